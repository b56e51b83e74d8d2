"""Teachers: the base or a deeper exit, as seen by a head with a vocabulary of its own.

N rows; D hidden size; V vocabulary; V_d the vocabulary of the head that is taught.
"""

import torch
from torch import Tensor

from ..heads import EarlyExitModel
from .exit_states import head_logits
from .loss import LOG_FLOOR, Teacher


@torch.no_grad()
def base_teacher(
    model: EarlyExitModel,
    index: int,  # which head is taught
    final: Tensor,  # [N, D], the base's final state
    log_normaliser: Tensor,  # [N] float32, logsumexp of the base's logits over its whole vocabulary
    top_token: Tensor,  # [N] int64
    windows: Tensor,  # [N] int64
) -> Teacher:
    """The base; of its logits only those that the head scores are computed."""
    log_probs = head_logits(model, index, final).float() - log_normaliser.unsqueeze(-1)
    return Teacher(log_probs=log_probs.clamp_min(LOG_FLOOR), top=_columns(model, index)[top_token], windows=windows)


@torch.no_grad()
def exit_teacher(
    model: EarlyExitModel,
    index: int,  # which head is taught
    deeper: int,  # which one teaches it
    state: Tensor,  # [N, D], of the deeper head
    windows: Tensor,  # [N] int64
) -> Teacher:
    """A deeper exit; a token that it does not score has the probability 0 there."""
    log_probs = head_logits(model, deeper, state).float().log_softmax(-1).clamp_min(LOG_FLOOR)
    top = _token_ids(model, deeper)[log_probs.argmax(-1)]
    if not _same_vocabulary(model, index, deeper):
        columns = _columns(model, deeper)[_token_ids(model, index)]
        log_probs = torch.where(columns < 0, LOG_FLOOR, log_probs[:, columns.clamp_min(0)])
    return Teacher(log_probs=log_probs, top=_columns(model, index)[top], windows=windows)


def _token_ids(model: EarlyExitModel, index: int) -> Tensor:  # [V_d] int64
    """The token of every column of a head's logits."""
    ids = model.exit_heads[index].draft_vocab_ids
    return torch.arange(model.backbone.vocab_size, device=model.backbone.device) if ids is None else ids


def _columns(model: EarlyExitModel, index: int) -> Tensor:  # [V] int64
    """The column of every token in a head's logits; -1 where it has none."""
    ids = _token_ids(model, index)
    columns = ids.new_full((model.backbone.vocab_size,), -1)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return columns


def _same_vocabulary(model: EarlyExitModel, first: int, second: int) -> bool:
    return torch.equal(_token_ids(model, first), _token_ids(model, second))
