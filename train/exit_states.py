"""Exit states: what the heads hand to the LM head on cached rows, read teacher-forced.

T rows of whole sequences side by side; R loss rows; D hidden size.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..heads import DenseAttention, EarlyExitModel
from .cache import Batch
from .windows import gather_context


def exit_state(
    model: EarlyExitModel,
    index: int,  # which head
    batch: Batch,
    context: Tensor,  # [1, T, D], from `gather_context`
    precision: torch.dtype | None = None,  # of the head's products; None is the base's
) -> Tensor:  # [R, D], in the head's own dtype
    """The state of head `index` on the loss rows, differentiable in the head's parameters."""
    head = model.exit_heads[index]
    hidden = batch.hidden[head.config.exit_layer]
    dtype = model.backbone.dtype if precision is None else precision
    if precision == torch.float32:
        hidden, context = hidden.float(), context.float()
    with _autocast(model, dtype):
        state: Tensor = head(hidden, context, batch.positions, DenseAttention(batch.lengths))
    return state[0, batch.loss_rows]


def batch_context(
    batch: Batch,
    last_known: Tensor,  # [T] int64, from `windows`
) -> Tensor:  # [1, T, D]
    """`gather_context` of a batch."""
    return gather_context(batch.final, batch.lengths, batch.positions, last_known)


def head_logits(
    model: EarlyExitModel,
    index: int,
    state: Tensor,  # [..., D], of any dtype
) -> Tensor:  # [..., V_d]
    """The logits of head `index` in the base's own dtype, as in inference."""
    return model.exit_logits(index, state.to(model.backbone.dtype))


def _autocast(model: EarlyExitModel, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Heads are trained in float32; beside a base of 16 bits their products run in its dtype, or in another one."""
    return torch.autocast(model.backbone.device.type, dtype, enabled=dtype != torch.float32)
