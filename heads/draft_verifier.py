"""A draft verifier: a guess, from what the draft exit has computed anyway, whether the base would accept its token.

The verifier of SPRINTER (Zhong et al. 2025, arXiv 2502.04557), here a logistic model. R rows; D hidden size;
V_d draft vocabulary; F features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE_FEATURES = ("log_odds", "margin", "entropy")
"""Of the exit's distribution, behind its state: log-odds of the likeliest token, its lead over the second, entropy."""
SMALLEST_DOUBT = 1e-6
"""The likeliest token counts as no surer than this much short of 1: beyond it float32 knows no odds."""


@dataclass(frozen=True, kw_only=True)
class DraftVerifier:
    """A logistic model of whether the base's own greedy choice is the likeliest token of a draft exit."""

    exit_layer: int
    """Of the exit that it was fitted to."""
    weight: Tensor
    """`[F]` float32, or only the last of these: one for each of `CONFIDENCE_FEATURES`."""
    bias: Tensor
    """`[]` float32."""

    def __post_init__(self) -> None:
        assert self.weight.ndim == 1
        assert self.bias.ndim == 0

    @torch.no_grad()
    def __call__(
        self,
        state: Tensor,  # [R, D], that the LM head reads
        logits: Tensor,  # [R, V_d], that it makes of it
    ) -> Tensor:  # [R] float32
        """How likely the base accepts the likeliest token of each row; NaN where a row is not finite."""
        reads_state = len(self.weight) > len(CONFIDENCE_FEATURES)
        return self.of_features(draft_features(state if reads_state else state[:, :0], logits))

    def of_features(
        self,
        features: Tensor,  # [R, F]
    ) -> Tensor:  # [R] float32
        """The same from `draft_features`."""
        features = features[:, -len(self.weight) :]
        return (features @ self.weight.to(features.device) + self.bias.to(features.device)).sigmoid()


def num_features(hidden_size: int) -> int:
    """F."""
    return hidden_size + len(CONFIDENCE_FEATURES)


def draft_features(
    state: Tensor,  # [R, D], that the LM head reads
    logits: Tensor,  # [R, V_d], that it makes of it
) -> Tensor:  # [R, F] float32
    """What a verifier sees of a drafted token: the exit's state, then `CONFIDENCE_FEATURES`."""
    log_probs = logits.float().log_softmax(-1)
    probs = log_probs.exp()
    # A draft vocabulary may be a single token, which leads by all it has.
    highest = probs.topk(min(2, probs.shape[-1]), dim=-1).values
    top = highest[:, 0]
    log_odds = log_probs.amax(-1) - (1 - top).clamp(min=SMALLEST_DOUBT).log()
    margin = top - highest[:, 1:].sum(-1)
    entropy = torch.special.entr(probs).sum(-1)
    return torch.cat([state.float(), torch.stack([log_odds, margin, entropy], dim=-1)], dim=-1)
