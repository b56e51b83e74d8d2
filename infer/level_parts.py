"""What of the model each level runs, over rows whose states wait in `StateWindows`.

T rows; D hidden size; V vocabulary; V_d draft vocabulary.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from torch import Tensor

from ..heads import EarlyExitModel, ExitHead, Native, StateRows, States, find_kernels, run_native
from .attention import IsKept, KeepOnly, PagedAttention
from .levels import Level
from .packed_rows import PackedRows
from .pass_runner import Part
from .state_windows import StateWindows

R = TypeVar("R")


class LevelParts:
    """Layers and heads by level: run at once, or as steps of our own kernels."""

    def __init__(self, model: EarlyExitModel, levels: tuple[Level, ...], windows: StateWindows) -> None:
        self._model = model
        self._backbone = model.backbone
        self._levels = levels
        self._exit_heads = model.exit_heads
        self._windows = windows
        self._has_kernels = model.backbone.device.type == "cpu" and find_kernels() is not None

    def layers(self, index: int) -> Part:
        """The layers of a level."""
        level = self._levels[index]
        name = f"layers {level.start} to {level.stop} of the {level.name} level"
        return Part(name, partial(self._run_layers, range(index, index + 1)), range(level.start, level.stop))

    def all_layers(self) -> Part:
        """The layers of all levels."""
        levels = range(len(self._levels))
        return Part("layers of all levels", partial(self._run_layers, levels), range(self._backbone.num_layers))

    def head_part(self, index: int) -> Part:
        """The head of a level below the target."""
        head = self.head(index)
        kv_layers = [head.kv_layer] if head.has_block else []
        return Part(f"head of the {self._levels[index].name} level", partial(self._run_head, index), kv_layers)

    def head(self, index: int) -> ExitHead:
        """That of a level below the target."""
        return self._exit_heads[self._head_number(index)]

    def vocab_ids(self, index: int) -> Tensor | None:  # [V_d] int64
        """The token ids that a level scores; None is the whole vocabulary."""
        return None if self._levels[index].head is None else self.head(index).draft_vocab_ids

    def exit_logits(self, index: int, state: Tensor) -> Tensor:  # [T, D] -> [T, V or V_d]
        """What a head's states say."""
        return self._model.exit_logits(self._head_number(index), state)

    def exit_step(self, index: int, state: StateRows) -> Native[Tensor] | None:
        """`exit_logits` as a step of our own kernels; None where these do not take it."""
        return self._model.exit_step(self._head_number(index), state)

    def logits_step(self, state: StateRows) -> Native[Tensor] | None:  # [T, V]
        """What the target's states say, as a step of our own kernels; None where these do not take it."""
        return self._backbone.logits_step(state)

    def layers_steps(self, levels: range, rows: PackedRows) -> Native[list[Tensor]] | None:  # [1, T, D] each
        """The layers of some levels as steps of our own kernels, which read the rows' tokens when they are done; None
        where these do not take them."""
        if not isinstance(self._source(levels[0], rows), StateRows):
            return None
        return self._by_layers(self._backbone.layers_steps, levels, rows)

    def head_step(self, index: int, rows: PackedRows) -> Native[Tensor] | None:  # [1, T, D]
        """A head as a step of our own kernels; None where these do not take it."""
        return self.head(index).step(*self.head_source(index, rows), rows.positions, rows.attend)

    def head_source(self, index: int, rows: PackedRows) -> tuple[StateRows, StateRows | None]:
        """What a head takes: states at its exit layer, and their contexts where it has them."""
        context = StateRows(self._windows.final, rows.context_slots, rows.number)
        has_context = self.head(index).config.committed_context
        hidden = StateRows(self._windows.tables[index], rows.window_slots, rows.number)
        return hidden, context if has_context else None

    def keep_of_head(
        self, index: int, source: tuple[StateRows, StateRows | None], positions: Tensor, attend: PagedAttention
    ) -> None:
        """Keep what a head's layer has of keys and values, and compute no more."""
        native = self.head(index).step(*source, positions, attend, keeps_only=True) if self._has_kernels else None
        if native is not None:
            run_native(native)
            return
        with suppress(IsKept):
            self.head(index)(*source, positions, KeepOnly(attend))

    def _run_layers(self, levels: range, rows: PackedRows) -> None:
        self._by_layers(self._backbone.run_through, levels, rows)

    def _by_layers(self, run: Callable[..., R], levels: range, rows: PackedRows) -> R:
        """Call what runs layers, or makes steps of them, for some levels."""
        return run(
            self._source(levels[0], rows),
            self._levels[levels[0]].start,
            [self._levels[index].stop for index in levels],
            rows.positions,
            rows.attend,
            norms=self._levels[levels[-1]].head is None,
            keeps=[StateRows(self._windows.tables[index], rows.window_slots) for index in levels],
        )

    def _source(self, index: int, rows: PackedRows) -> States:
        """What the layers of a level take."""
        if index == 0:
            embedded = self._backbone.embedded(rows.token_ids, rows.positions)
            return embedded._replace(number=rows.number) if isinstance(embedded, StateRows) else embedded
        return StateRows(self._windows.tables[index - 1], rows.window_slots, rows.number)

    def _run_head(self, index: int, rows: PackedRows) -> Tensor:  # [T, D]
        return self.head(index)(*self.head_source(index, rows), rows.positions, rows.attend)[0]

    def _head_number(self, index: int) -> int:
        """Which of the model's heads a level has."""
        number = self._levels[index].head
        assert number is not None
        return number
