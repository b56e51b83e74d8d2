"""The verifier of an adapter's draft exit on disk, two files beside it: for the lossy method `sprinter` alone.

Both carry the digest of what they belong to, so that tensors of another verifier, or heads that were trained anew, are
found out.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from ..heads import CONFIDENCE_FEATURES, DraftVerifier
from .adapter import VERIFIER_CONFIG_FILE, VERIFIER_WEIGHTS_FILE, WEIGHTS_FILE
from .atomic import write_atomically

FORMAT_VERSION = 1
KEYS = {
    "format_version",
    "exit_layer",
    "confidence_features",
    "adapter_sha256",
    "tensors_sha256",
    "measured",
    "run",
}


def save_verifier(
    verifier: DraftVerifier,
    folder: str | Path,  # of the adapter whose exit it was fitted to
    *,
    measured: Mapping[str, Any],  # JSON-ready, on held-out tokens
    run: Mapping[str, Any],  # JSON-ready, how it was made
) -> None:
    """Put a verifier beside its adapter, in the place of an older one; whenever this is interrupted, the folder holds
    the old one, the new one, or one that `load_verifier` refuses. ValueError where it cannot be written.
    """
    folder = Path(folder)
    tensors = {"weight": verifier.weight.cpu().contiguous(), "bias": verifier.bias.cpu()}
    content = save(tensors, metadata={"format": "pt"})
    config = {
        "format_version": FORMAT_VERSION,
        "exit_layer": verifier.exit_layer,
        "confidence_features": list(CONFIDENCE_FEATURES),
        "adapter_sha256": _digest(folder / WEIGHTS_FILE),
        "tensors_sha256": hashlib.sha256(content).hexdigest(),
        "measured": measured,
        "run": run,
    }
    text = json.dumps(config, indent=2) + "\n"
    try:
        write_atomically(folder / VERIFIER_WEIGHTS_FILE, content)
        write_atomically(folder / VERIFIER_CONFIG_FILE, text)
    except OSError as error:
        raise ValueError(
            f"cannot write the verifier to {folder} ({error.strerror}); make room there, or fit it to a copy of the "
            "adapter (--adapter)"
        ) from error


def load_verifier(folder: str | Path) -> DraftVerifier:
    """The verifier of an adapter; ValueError, with the remedy, where there is none that is wholly that of its heads."""
    folder = Path(folder)
    remedy = f"fit one: python -m hispec.train.sprinter --adapter {folder} --responses FILE"
    config = _read_config(folder, remedy)
    path = folder / VERIFIER_WEIGHTS_FILE
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is missing or broken ({error}); {remedy}") from error
    if hashlib.sha256(content).hexdigest() != config["tensors_sha256"]:
        raise ValueError(f"{path} is not the file that {VERIFIER_CONFIG_FILE} belongs to; {remedy}")
    if _digest(folder / WEIGHTS_FILE) != config["adapter_sha256"]:
        raise ValueError(f"the verifier in {folder} was fitted to other heads than lie there now; {remedy}")
    kinds = {name: (tensor.ndim, str(tensor.dtype)) for name, tensor in tensors.items()}
    if kinds != {"weight": (1, "torch.float32"), "bias": (0, "torch.float32")}:
        raise ValueError(f"{path} holds {kinds}, not one weight and one bias in float32; {remedy}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError(f"{path} holds NaN or infinity; {remedy}")
    return DraftVerifier(exit_layer=config["exit_layer"], weight=tensors["weight"], bias=tensors["bias"])


def _read_config(folder: Path, remedy: str) -> dict[str, Any]:
    path = folder / VERIFIER_CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"the adapter {folder} has no verifier, which method 'sprinter' needs; {remedy}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); {remedy}") from error
    if not isinstance(config, dict) or config.keys() != KEYS:
        raise ValueError(f"{path} is no verifier's: its keys are not {', '.join(sorted(KEYS))}; {remedy}")
    if config["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {config['format_version']!r}, known is {FORMAT_VERSION}; {remedy}")
    if config["confidence_features"] != list(CONFIDENCE_FEATURES):
        raise ValueError(f"{path} names other features than {', '.join(CONFIDENCE_FEATURES)}; {remedy}")
    if type(config["exit_layer"]) is not int:
        raise ValueError(f"{path}: exit_layer is {config['exit_layer']!r}, no whole number; {remedy}")
    return config


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a folder that save_adapter wrote") from error
