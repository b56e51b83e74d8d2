"""The losses of all exits in one forward pass, the module that is trained.

T rows of whole sequences side by side; D hidden size.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..heads import EarlyExitModel
from .cache import Batch
from .exit_states import batch_context, exit_state, head_logits
from .loss import chunked_loss


class ExitLosses(nn.Module):
    """Every head's loss: one forward uses every parameter, for a head left out of it would stall the other ranks."""

    def __init__(self, model: EarlyExitModel, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        # Only the heads are this module's own: what wraps it to spread the training must not see the base.
        self.heads = model.heads
        self._model = (model,)
        self._loss = loss

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
                exit_state(model, index, batch, context),
                final,
                log_normaliser,
                loss=self._loss,
                to_logits=partial(head_logits, model, index),
            )
            for index in range(len(model.heads))
        ]
