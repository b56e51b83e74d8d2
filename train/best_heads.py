"""The best heads so far, by held-out expected acceptance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import TrainingState, load_training_state, save_training_state
from ..heads import EarlyExitModel
from .evaluate import TARGET


class BestHeads:
    """Keeps in `folder` the heads of the best evaluation: what the draft exit proposes, the target accepts most of."""

    def __init__(self, folder: Path, model: EarlyExitModel, settings: Mapping[str, Any]) -> None:
        self._folder, self._model, self._settings = folder, model, settings
        self._hop = f"{model.exit_layers[0]}->{TARGET}"

    def save_if_best(self, record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
        """Save the model's heads, which were measured as `record` says, if none of `earlier` is as good."""
        best = max(map(self._acceptance, earlier), default=-1.0)
        # The folder may be missing: only now was it asked for.
        if self._acceptance(record) > best or not self._folder.exists():
            state = TrainingState(step=record["step"], content={"heads": self._model.heads.state_dict()})
            save_training_state(self._folder, state, self._settings, num_kept=1)

    def take(self) -> None:
        """Give the model the best heads; where none were saved it keeps its own."""
        state = load_training_state(self._folder, self._settings)
        if state is not None:
            self._model.heads.load_state_dict(state.content["heads"])
            self._model.refresh_draft_vocab()

    def num_worse(self, records: Sequence[Mapping[str, Any]]) -> int:
        """How many evaluations came after the best one, the first of equals."""
        values = [self._acceptance(record) for record in records]
        return len(values) - 1 - values.index(max(values)) if values else 0

    def _acceptance(self, record: Mapping[str, Any]) -> float:
        return float(record[self._hop]["acceptance"])
