"""The losses of all exits in one forward pass, the module that is trained.

T rows of whole sequences side by side; D hidden size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..heads import EarlyExitModel
from .cache import Batch
from .exit_states import batch_context, exit_state, head_logits
from .loss import chunked_loss


class ExitLosses(nn.Module):
    """Every head's loss: one forward uses every parameter, for a head left out of it would stall the other ranks."""

    def __init__(
        self,
        model: EarlyExitModel,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        precision: torch.dtype | None = None,  # of the heads' products; None is the base's
        activation_checkpointing: bool = False,  # whether a head is computed twice, to keep nothing in between
    ) -> None:
        super().__init__()
        # Only the heads are this module's own: what wraps it to spread the training must not see the base.
        self.heads = model.heads
        self._model = (model,)
        self._loss = loss
        self._precision = precision
        self._activation_checkpointing = activation_checkpointing

    def on(self, model: EarlyExitModel) -> "ExitLosses":
        """The same losses of the heads of another model."""
        return ExitLosses(
            model,
            self._loss,
            precision=self._precision,
            activation_checkpointing=self._activation_checkpointing,
        )

    def forward(
        self,
        batch: Batch,
        windows: Tensor,  # [T] int64, newest position whose final state is known
    ) -> list[Tensor]:
        """The loss of each exit, `[]` float32, summed over the batch's loss rows; a shared head's has no gradient."""
        (model,) = self._model
        context = batch_context(batch, windows)
        final, log_normaliser = batch.final[batch.loss_rows], batch.log_normaliser[batch.loss_rows]
        return [
            chunked_loss(
                self._state(index, batch, context),
                final,
                log_normaliser,
                loss=self._loss,
                to_logits=partial(head_logits, model, index),
            )
            for index in range(len(model.heads))
        ]

    def _state(self, index: int, batch: Batch, context: Tensor) -> Tensor:  # [R, D]
        (model,) = self._model
        if not self._activation_checkpointing:
            return exit_state(model, index, batch, context, self._precision)
        # The reentrant kind would run without gradients, and give none where no input needs one: the base is frozen.
        state: Tensor = checkpoint(exit_state, model, index, batch, context, self._precision, use_reentrant=False)
        return state
