"""The training state: what an interrupted run needs to go on as if it had never stopped."""

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .atomic import atomic_folder

FORMAT_VERSION = 1
NUM_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """One point of a training run."""

    step: int
    """Number of steps done."""
    content: dict[str, Any]
    """Tensors, numbers, texts, None, and lists and dicts of them, such as the state dict of an optimizer."""


def save_training_state(
    folder: Path,
    state: TrainingState,
    settings: Mapping[str, Any],  # JSON-ready, whatever must be the same for the run to go on
    *,
    num_kept: int = NUM_KEPT,  # this one included
) -> None:
    """Write `state` into `folder`, wholly or not at all, and keep the newest ones; never a pickle."""
    tensors: dict[str, Tensor] = {}
    record = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "settings": settings,
        "content": _take_out_tensors(state.content, tensors),
    }
    with atomic_folder(folder / f"state-{state.step:09d}") as partial:
        save_file(tensors, partial / "tensors.safetensors")
        (partial / "state.json").write_text(json.dumps(record), encoding="utf-8")
    for old in _saved(folder)[num_kept:]:
        shutil.rmtree(old, ignore_errors=True)
    # What a killed process had begun to write.
    for begun in folder.glob(".state-*"):
        shutil.rmtree(begun, ignore_errors=True)


def load_training_state(folder: Path, settings: Mapping[str, Any]) -> TrainingState | None:
    """The newest state in `folder` that is whole; None where there is none yet.

    Raises ValueError where it belongs to other settings, naming each, and where every state is broken.
    """
    saved = _saved(folder)
    for path in saved:
        try:
            record = json.loads((path / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(path / "tensors.safetensors")
            version, step, old_settings = record["format_version"], record["step"], record["settings"]
            content = _put_back_tensors(record["content"], tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(f"the training state {path} is broken ({error}); trying the one before", stacklevel=2)
            continue
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the training state {path} has format version {version}, this hispec reads "
                f"{FORMAT_VERSION}; start again with --no-resume"
            )
        if changes := _changes(old_settings, json.loads(json.dumps(settings))):
            raise ValueError(
                f"the training state in {folder} belongs to other settings: {'; '.join(changes)}. "
                "Use the same settings or another output folder, or start again with --no-resume"
            )
        return TrainingState(step=step, content=content)
    if saved:
        raise ValueError(f"every training state in {folder} is broken; start again with --no-resume")
    return None


def _saved(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("state-*"), reverse=True)


def _take_out_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON-ready values; its tensors go to `tensors`, under names that stand in their places."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        # Pairs, because JSON would turn an optimizer's whole-number keys into text.
        return {"dict": [[key, _take_out_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_take_out_tensors(item, tensors) for item in value]
    return value


def _put_back_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_back_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {key: _put_back_tensors(item, tensors) for key, item in value["dict"]}


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [line for key in keys for line in _changes(old.get(key), new.get(key), f"{name}.{key}" if name else key)]
    return [] if old == new else [f"{name or 'settings'} was {old!r}, is now {new!r}"]
