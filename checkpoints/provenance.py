"""Provenance: which base model an adapter belongs to, and how it was made."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

import torch
from transformers import PreTrainedModel

from .hub import is_hub_id

# Few, and stable between releases of transformers; what they leave out shows in the weights.
ARCHITECTURE_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
NUM_SAMPLES = 16
SMALLEST_SAMPLE = 2.0**-14
PACKAGES = ("hispec", "torch", "transformers", "safetensors", "huggingface_hub", "datasets", "peft")


def fingerprint(base: PreTrainedModel) -> dict[str, Any]:
    """What tells `base` from every other model, JSON-ready: architecture, and a digest of sampled weights.

    The same in float32, bfloat16 and, for weights released in either half precision, float16; on any device.
    A few values of each tensor are read, so the cost does not grow with their size.
    """
    digest = hashlib.sha256()
    for _, parameter in sorted(base.named_parameters()):
        digest.update(_sample(parameter.detach()))
    architecture = {field: getattr(base.config, field, None) for field in ARCHITECTURE_FIELDS}
    return {"architecture": architecture, "weights": digest.hexdigest()[:32]}


def explain_mismatch(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """In what the base `found` differs from the `recorded` one, in words; None where they are the same."""
    for field in ARCHITECTURE_FIELDS:
        old, new = recorded["architecture"].get(field), found["architecture"][field]
        if old != new:
            return f"{field} is {new}, not {old}"
    if recorded["weights"] != found["weights"]:
        return "the architecture is the same, but the weights are others (another revision, or fine-tuned)"
    return None


def base_source(base: PreTrainedModel) -> str | None:
    """The hub id or `package:` source of `base`; None for a folder, whose path means nothing elsewhere."""
    name = str(base.config._name_or_path)
    return name if name.startswith("package:") or is_hub_id(name) else None


def run_record(
    *,
    command: Sequence[str],  # sys.argv
    recipe: Mapping[str, Any],  # resolved
    acceptance: Mapping[str, Any],  # measured on held-out data
) -> dict[str, Any]:
    """How an adapter was made, JSON-ready; of a local path only the last part is kept."""
    record = {
        "command": [PurePath(command[0]).name, *command[1:]],
        "versions": {"python": platform.python_version(), **package_versions()},
        "recipe": recipe,
        "acceptance": acceptance,
    }
    shortened = _without_local_paths(record)
    assert isinstance(shortened, dict)
    return shortened


def _sample(tensor: torch.Tensor) -> bytes:
    """Evenly spread values, in bfloat16, with those dropped that float16 cannot hold as exactly."""
    flat = tensor.reshape(-1)
    values = flat[:: max(1, len(flat) // NUM_SAMPLES)][:NUM_SAMPLES].to(torch.bfloat16).float().cpu()
    values[values.abs() < SMALLEST_SAMPLE] = 0
    return values.numpy().astype("<f4").tobytes()


def package_versions() -> dict[str, str]:
    """Of hispec and the packages that it stands on, those that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _without_local_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_local_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_local_paths(item) for item in value]
    if isinstance(value, str):
        # Also the part of a flag written as --output=PATH.
        flag, equals, path = value.rpartition("=")
        return flag + equals + (PurePath(path).name if Path(path).expanduser().is_absolute() else path)
    return value
