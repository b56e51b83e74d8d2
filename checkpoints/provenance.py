"""Provenance: which base model an adapter belongs to, and how it was made."""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..heads import held_module, is_quantized
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
HEADS_MODULE = "exit_heads"
"""Where heads that are an adapter of peft hang on the base: no part of what the base is."""
NUM_SAMPLES = 16
SMALLEST_SAMPLE = 2.0**-14
PACKAGES = ("hispec", "torch", "transformers", "safetensors", "huggingface_hub", "datasets", "peft")


def fingerprint(base: PreTrainedModel) -> dict[str, Any]:
    """What tells `base` from every other model, JSON-ready: architecture, and a digest of sampled weights.

    The same in float32, bfloat16 and, for weights released in either half precision, float16; on any device.
    A few values of each tensor are read, so the cost does not grow with their size. The adapters of peft that work on
    the base count too, and have a digest of their own beside; a merged one is part of the weights.
    """
    own = [_sample(parameter) for _, parameter in sorted(_own_parameters(base).items())]
    adapters = [part for _, part in sorted(_active_tensors(base, ""))]
    result: dict[str, Any] = {
        "architecture": {field: getattr(base.config, field, None) for field in ARCHITECTURE_FIELDS},
        "weights": _digest([*own, *adapters]),
    }
    if adapters:
        result["adapters"] = _digest(adapters)
    if quantized := sorted({type(module).__name__ for _, module in _own_modules(base, "") if is_quantized(module)}):
        result["quantization"] = ",".join(quantized)
    return result


def heads_fingerprint(heads: nn.Module) -> str:
    """A digest that tells trained heads from others: of sampled weights, and of every draft vocabulary."""
    weights = [name.encode() + _sample(tensor) for name, tensor in sorted(heads.named_parameters())]
    ids = [name.encode() + tensor.cpu().numpy().tobytes() for name, tensor in sorted(heads.named_buffers())]
    return _digest([*weights, *ids])


def adapter_fingerprint(base: PreTrainedModel) -> dict[str, Any]:
    """`fingerprint` with a digest of what quantising keeps: embeddings, norms and biases.

    By it heads and a base are known to each other when one of them is of another quantisation.
    """
    embeddings = {id(module.weight) for _, module in _own_modules(base, "") if isinstance(module, nn.Embedding)}
    kept = [
        _sample(parameter)
        for _, parameter in sorted(_own_parameters(base).items())
        if parameter.is_floating_point() and (parameter.dim() == 1 or id(parameter) in embeddings)
    ]
    return fingerprint(base) | {"kept": _digest(kept)}


def explain_mismatch(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """In what the base `found` differs from the `recorded` one, in words; None where they are the same."""
    for field in ARCHITECTURE_FIELDS:
        old, new = recorded["architecture"].get(field), found["architecture"][field]
        if old != new:
            return f"{field} is {new}, not {old}"
    if recorded.get("adapters") != found.get("adapters"):
        if "adapters" not in recorded:
            return "it carries an adapter (such as LoRA) that was not there when the heads were made"
        return "it is without the adapter (such as LoRA) that was there when the heads were made, or has another one"
    if is_requantized(recorded, found):
        if "kept" not in recorded:
            return "it is quantised, and the adapter's files are too old to tell of what"
        same = recorded["kept"] == found["kept"]
        return None if same else "it is quantised otherwise, and what quantising keeps is different too"
    if recorded["weights"] != found["weights"]:
        return "the architecture is the same, but the weights are others (another revision, or fine-tuned)"
    return None


def is_requantized(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether one of the two is quantised and the other is not, or in another way."""
    return bool(recorded.get("quantization") != found.get("quantization"))


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


def _own_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a base, those that adapters hold in their places, without the adapters and without heads."""
    held = held_module(module)
    if held is not None:
        yield from _own_modules(held, path)
        return
    yield path, module
    for name, child in module.named_children():
        if path or name != HEADS_MODULE:
            yield from _own_modules(child, f"{path}{name}.")


def _own_parameters(base: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a base by the names that they have without adapters, tied ones once."""
    own: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for path, module in _own_modules(base, ""):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                own[path + name] = parameter
    return own


def _active_tensors(module: Any, path: str) -> Iterator[tuple[str, bytes]]:
    """What the adapters that work on a base add to it."""
    held = held_module(module)
    if held is None:
        for name, child in module.named_children():
            yield from _active_tensors(child, f"{path}{name}.")
        return
    yield from _active_tensors(held, path)
    working = set() if module.disable_adapters else {*module.active_adapters} - {*module.merged_adapters}
    of_base = {id(parameter) for parameter in held.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in of_base and working & {*name.split(".")}:
            yield f"{path}{'.'.join(part for part in name.split('.') if part not in working)}", _sample(parameter)
    for name, scale in getattr(module, "scaling", {}).items():
        if name in working:
            yield f"{path}scaling", repr(float(scale)).encode()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _sample(tensor: torch.Tensor) -> bytes:
    """Evenly spread values, in bfloat16, with those dropped that float16 cannot hold as exactly."""
    flat = tensor.detach().reshape(-1)
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
