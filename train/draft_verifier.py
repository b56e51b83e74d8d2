"""Fits the verifier of a draft exit: would the base accept the exit's token?

R loss rows; F features; see `heads.draft_verifier`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from ..heads import CONFIDENCE_FEATURES, DraftVerifier, EarlyExitModel, draft_features, num_features
from .cache import StateSource
from .exit_states import batch_context, exit_state, head_logits
from .windows import random_windows

THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
DECAY = 1e-3
"""Weight of the squared weights beside the mean loss; features have variance 1."""
ROWS_PER_CHUNK = 256


class Judgements(NamedTuple):
    """What a draft exit would have drafted, row by row, and what the base says to it."""

    features: Tensor  # [R, F] float32
    is_accepted: Tensor  # [R] bool


@torch.no_grad()
def collect(
    model: EarlyExitModel,
    states: StateSource,
    indices: Sequence[int],  # sequences of the states
    *,
    exit_index: int = 0,  # of the model's heads
    max_window: int = 8,  # rows back to the committed context at most
    batch_tokens: int = 2048,
    seed: int = 0,
) -> Judgements:
    """Every loss row of the sequences, read teacher-forced: the exit's likeliest token against the base's."""
    head = model.exit_heads[exit_index]
    parts, labels = [torch.empty(0, num_features(model.backbone.hidden_size))], [torch.empty(0, dtype=torch.bool)]
    total = sum(states.sequences[index].length for index in indices)
    with tqdm(total=total, unit="tok", desc="read") as progress:
        for start, chosen in enumerate(_batches(states, indices, batch_tokens)):
            batch = states.read(chosen, [head.config.exit_layer], model.backbone)
            context = batch_context(batch, random_windows(batch.lengths, batch.spans, max_window, seed + start))
            state = exit_state(model, exit_index, batch, context)
            for part, rows in zip(state.split(ROWS_PER_CHUNK), batch.loss_rows.split(ROWS_PER_CHUNK), strict=True):
                logits = head_logits(model, exit_index, part)
                top = logits.argmax(-1)
                top = top if head.draft_vocab_ids is None else head.draft_vocab_ids[top]
                parts.append(draft_features(part, logits).cpu())
                labels.append((top == batch.top_token[rows]).cpu())
            progress.update(sum(batch.lengths))
    return Judgements(torch.cat(parts), torch.cat(labels))


def fit(judgements: Judgements, exit_layer: int, *, reads_state: bool = False) -> DraftVerifier:
    """The logistic model of least mean loss, with a little weight decay; ValueError where one side has no rows.

    Without `reads_state` it reads `CONFIDENCE_FEATURES` alone, which need few rows.
    """
    features, labels = judgements.features, judgements.is_accepted.float()
    if not reads_state:
        features = features[:, -len(CONFIDENCE_FEATURES) :]
    if len(labels) == 0 or labels.min() == labels.max():
        what = "no token" if len(labels) == 0 else f"{int(labels.sum())} of {len(labels)} tokens accepted"
        raise ValueError(f"the responses have {what}, so there is nothing to tell apart; give more responses")
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    scaled = (features - mean) / std
    weight = torch.zeros(features.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(scaled @ weight + bias, labels) + DECAY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        raw = weight / std
        return DraftVerifier(exit_layer=exit_layer, weight=raw, bias=bias - mean @ raw)


@torch.no_grad()
def measure(verifier: DraftVerifier, judgements: Judgements) -> dict[str, Any]:
    """How well it tells, JSON-ready.

    - `num_tokens`, `accepted` (share that the base accepts), `loss` (mean, in nats), `loss_without` (of one that
      knows the share alone), `auc` (how often an accepted token is held likelier than one that is not).
    - `thresholds`: for each, the share of tokens that are `trusted`, and of these the share `right`, null of none.
    """
    labels, probs = judgements.is_accepted, verifier.of_features(judgements.features).double()
    clamped = probs.clamp(1e-12, 1 - 1e-12)
    share = labels.double().mean()
    return {
        "num_tokens": len(labels),
        "accepted": share.item(),
        "loss": F.binary_cross_entropy(clamped, labels.double()).item(),
        "loss_without": (torch.special.entr(share) + torch.special.entr(1 - share)).item(),
        "auc": area_under_curve(probs, labels),
        "thresholds": [
            {
                "threshold": threshold,
                "trusted": (probs >= threshold).double().mean().item(),
                "right": labels[probs >= threshold].double().mean().item() if (probs >= threshold).any() else None,
            }
            for threshold in THRESHOLDS
        ],
    }


def area_under_curve(
    scores: Tensor,  # [R]
    labels: Tensor,  # [R] bool
) -> float | None:
    """How often a true row scores higher than a false one, ties counting half; None where one kind is missing."""
    num_true = int(labels.sum())
    num_false = len(labels) - num_true
    if not num_true or not num_false:
        return None
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2  # of equal scores the mean of their places, from 1
    above = ranks[inverse][labels].sum() - num_true * (num_true + 1) / 2
    return float(above / (num_true * num_false))


def _batches(states: StateSource, indices: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for index in indices:
        if sum(states.sequences[other].length for other in batches[-1]) >= batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]
