"""Losses: how far an exit head is from a deeper level, row by row.

N rows; V_d the head's vocabulary, whole or draft. All logarithms are natural. A draft vocabulary leaves the head
without any mass outside it, the teacher with some: its probabilities on V_d then sum to m < 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..recipes import parse_loss

LOG_FLOOR = -50.0
"""What stands for the logarithm of a probability of 0, so that no loss is infinite."""
ADAPTIVE_DECAY = 3.0
"""How fast `adaptive_acceptance` leaves the KL divergence as the acceptance rises."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What a head is held against on N rows: the base, or a deeper exit. Nothing of it has a gradient."""

    log_probs: Tensor
    """`[N, V_d]` float32, at least LOG_FLOOR."""
    top: Tensor
    """`[N]` int64: column of the teacher's most likely token; -1 where the head does not score it."""
    windows: Tensor
    """`[N]` int64: the same number for the rows of one draft, which stand side by side in order."""


Loss = Callable[
    [
        Tensor,  # [N, V_d] float32, the head's log-probabilities
        Teacher,
    ],
    Tensor,  # [N] float32
]


def forward_kl(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`sum p (log p - log q)` over the head's vocabulary; the teacher's mass outside it is dropped."""
    return (teacher.log_probs.exp() * (teacher.log_probs - log_probs)).sum(-1)


def reverse_kl(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`sum q (log q - log p)`, exact: the head has no mass outside its vocabulary. At least `-log m`."""
    return (log_probs.exp() * (log_probs - teacher.log_probs)).sum(-1)


def jsd(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """The Jensen-Shannon divergence over the whole vocabulary, 0 to log 2."""
    probs, teacher_probs = log_probs.exp(), teacher.log_probs.exp()
    log_middle = torch.logaddexp(log_probs, teacher.log_probs) - math.log(2)
    inside = probs * (log_probs - log_middle) + teacher_probs * (teacher.log_probs - log_middle)
    # Outside the middle is half of the teacher alone.
    outside = (1 - teacher_probs.sum(-1)).clamp_min(0) * math.log(2)
    return (inside.sum(-1) + outside) / 2


def cross_entropy(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`-log q` of the teacher's most likely token, the one that greedy decoding keeps.

    0 where the head does not score that token: whatever it drafts there is rejected.
    """
    of_top = log_probs.gather(-1, teacher.top.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(teacher.top < 0, 0.0, -of_top)


def total_variation(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`1 - sum min(p, q)`: the probability that a draft of the head is rejected (DistillSpec, arXiv 2310.08461)."""
    return 1 - _log_acceptance(log_probs, teacher).exp()


def log_acceptance(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`-log sum min(p, q)`: where little is accepted, its gradient does not vanish (LK losses, arXiv 2602.23881)."""
    return -_log_acceptance(log_probs, teacher)


def adaptive_acceptance(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """`w KL + (1 - w) TV` with `w = exp(-3 a)`, a the row's acceptance: from KL to TV as the head learns.

    After the hybrid of LK losses (arXiv 2602.23881); here each row has its own weight.
    """
    acceptance = _log_acceptance(log_probs, teacher).exp()
    weight = (-ADAPTIVE_DECAY * acceptance.detach()).exp()
    return weight * forward_kl(log_probs, teacher) + (1 - weight) * (1 - acceptance)


def acceptance_length(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """The probability that a drafted token is not kept, because it or one before it in its draft is rejected.

    Summed over a draft of K rows it is K minus the number of tokens that are expected to be kept, `sum_k prod_{j<=k}
    a_j` (Leviathan et al., arXiv 2211.17192), so that an early row has the weight of all that hang on it.
    """
    log_kept = _log_acceptance(log_probs, teacher).double()
    before = log_kept.cumsum(0) - log_kept
    is_first = torch.ones_like(teacher.windows, dtype=torch.bool)
    is_first[1:] = teacher.windows[1:] != teacher.windows[:-1]
    rows = torch.arange(len(log_kept), device=log_kept.device)
    first = torch.where(is_first, rows, 0).cummax(0).values if len(rows) else rows
    return (1 - (before - before[first] + log_kept).exp()).float()


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
    "adaptive_acceptance": adaptive_acceptance,
    "acceptance_length": acceptance_length,
}


def make_loss(text: str) -> Loss:
    """The loss that a recipe writes as a name or a weighted sum of names; ValueError for what is none."""
    weights = parse_loss(text)

    def mixture(log_probs: Tensor, teacher: Teacher) -> Tensor:
        return _weighted_sum({name: LOSSES[name](log_probs, teacher) for name in weights}, weights)

    return mixture


def _weighted_sum(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    return torch.stack([weights[name] * value for name, value in values.items()]).sum(0)


def _log_acceptance(log_probs: Tensor, teacher: Teacher) -> Tensor:  # [N]
    """`log sum min(p, q)`, in logarithms so that it stays finite."""
    return torch.minimum(teacher.log_probs, log_probs).logsumexp(-1)
