"""Trackers: where the numbers of a run can be watched while it goes on."""

import importlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..checkpoints import write_atomically


class Tracker(Protocol):
    """Takes numbers by name."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Note `values` at a step."""

    def close(self) -> None:
        """Bring everything where it belongs."""


class TensorBoard:
    """Writes event files into `folder/tensorboard`; what an earlier run wrote from `next_step` on is hidden."""

    def __init__(self, folder: Path, next_step: int) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=next_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a W&B run of the project hispec, the same whenever the training goes on."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        path = folder / "wandb_run_id"
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        run_id = path.read_text(encoding="utf-8")
        self._run = wandb.init(
            project="hispec", name=folder.name, dir=str(folder), config=dict(settings), id=run_id, resume="allow"
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError, before hours of work, where the package of a tracker is missing."""
    for name in names:
        try:
            importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            raise ValueError(
                f"the tracker {name} needs a package that is not here ({error}); "
                f"`pip install {name}`, or leave it out of training.trackers"
            ) from error


def open_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], next_step: int) -> list[Tracker]:
    """The trackers of these names, for the run in `folder`."""
    return [
        TensorBoard(folder, next_step) if name == "tensorboard" else WeightsAndBiases(folder, settings)
        for name in names
    ]
