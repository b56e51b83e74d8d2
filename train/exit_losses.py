"""The losses of all exits in one forward pass, the module that is trained.

T rows of whole sequences side by side; R loss rows; D hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..heads import EarlyExitModel
from .cache import Batch
from .chunks import chunk_rows, chunked_sum
from .exit_states import batch_context, exit_state, head_logits
from .loss import Loss
from .teacher import base_teacher, exit_teacher
from .windows import window_starts


class ExitLosses(nn.Module):
    """Every head's loss: one forward uses every parameter, for a head left out of it would stall the other ranks."""

    def __init__(
        self,
        model: EarlyExitModel,
        loss: Loss,
        *,
        final_loss: Loss | None = None,  # of the last steps; None is `loss`
        exit_weights: Sequence[float] | None = None,  # one an exit; None is 1 for all
        against: float | None = None,  # weight of an exit's loss against the next deeper one; None leaves it out
        rows_per_chunk: int = 512,  # rows whose logits are alive at a time
        precision: torch.dtype | None = None,  # of the heads' products; None is the base's
        activation_checkpointing: bool = False,  # whether a head is computed twice, to keep nothing in between
    ) -> None:
        super().__init__()
        # Only the heads are this module's own: what wraps it to spread the training must not see the base.
        self.heads = model.heads
        self._model = (model,)
        self._loss, self._final_loss = loss, final_loss
        self._options: dict[str, Any] = {
            "final_loss": final_loss,
            "exit_weights": exit_weights,
            "against": against,
            "rows_per_chunk": rows_per_chunk,
            "precision": precision,
            "activation_checkpointing": activation_checkpointing,
        }
        self._exit_weights = [1.0] * len(model.heads) if exit_weights is None else list(exit_weights)
        self._against = against
        self._rows_per_chunk = rows_per_chunk
        self._precision = precision
        self._activation_checkpointing = activation_checkpointing

    def on(self, model: EarlyExitModel) -> "ExitLosses":
        """The same losses of the heads of another model."""
        return ExitLosses(model, self._loss, **self._options)

    def forward(
        self,
        batch: Batch,
        windows: Tensor,  # [T] int64, newest position whose final state is known
        is_final: bool = False,  # whether this is one of the last steps
    ) -> list[Tensor]:
        """The loss of each exit, `[]` float32, weighted and summed over the batch's loss rows.

        A shared head's has no gradient.
        """
        (model,) = self._model
        context = batch_context(batch, windows)
        states = [self._state(index, batch, context) for index in range(len(model.heads))]
        starts = window_starts(batch.positions.cpu(), windows.cpu())[batch.loss_rows.cpu()]
        chunks = chunk_rows(starts, self._rows_per_chunk)
        starts = starts.to(batch.loss_rows.device)
        loss = self._final_loss if is_final and self._final_loss is not None else self._loss
        return [
            weight * chunked_sum(state, partial(self._of_rows, loss, index, batch, states, starts), chunks)
            for index, (state, weight) in enumerate(zip(states, self._exit_weights, strict=True))
        ]

    def _state(self, index: int, batch: Batch, context: Tensor) -> Tensor:  # [R, D]
        (model,) = self._model
        if not self._activation_checkpointing:
            return exit_state(model, index, batch, context, self._precision)
        # The reentrant kind would run without gradients, and give none where no input needs one: the base is frozen.
        state: Tensor = checkpoint(exit_state, model, index, batch, context, self._precision, use_reentrant=False)
        return state

    def _of_rows(
        self,
        loss: Loss,
        index: int,
        batch: Batch,
        states: Sequence[Tensor],  # by exit: [R, D]
        starts: Tensor,  # [R] int64
        part: Tensor,  # [N, D], rows of the state of exit `index`
        rows: slice,  # which
    ) -> Tensor:  # [] float32
        (model,) = self._model
        log_probs = head_logits(model, index, part).float().log_softmax(-1)
        loss_rows = batch.loss_rows[rows]
        base = base_teacher(
            model,
            index,
            batch.final[loss_rows],
            batch.log_normaliser[loss_rows],
            batch.top_token[loss_rows],
            starts[rows],
        )
        value = loss(log_probs, base).sum()
        if self._against is not None and index + 1 < len(states):
            deeper = exit_teacher(model, index, index + 1, states[index + 1][rows], starts[rows])
            value = value + self._against * loss(log_probs, deeper).sum()
        return value
