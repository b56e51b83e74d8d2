"""Evaluation on held-out responses: how often a level's choice survives the next one.

R loss rows; D hidden size; U the union of the heads' vocabularies.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..heads import EarlyExitModel
from .cache import Batch, StateCache
from .exit_states import batch_context, exit_state, head_logits
from .windows import fixed_distance, random_windows

TARGET = "target"


def evaluate(
    model: EarlyExitModel,
    cache: StateCache,
    indices: Sequence[int],  # sequences of the cache
    *,
    max_window: int,
    distances: Sequence[int] = (1, 2, 4, 8),
    batch_tokens: int = 4096,
    seed: int = 0,
    show_progress: bool = False,
) -> dict[str, Any]:
    """How often a level's choice survives a deeper one, for every pair of levels.

    Hops are named "4->8", "4->target". Each has its `agreement` (same most likely token: what greedy decoding
    accepts) and its `acceptance` (expected, `sum min(p, q)` at temperature 1). `hops` and `by_kind` have
    windows as in training; in `by_distance` every row is as far from its committed context as the key says
    (left out where no head has committed context).
    """
    num_tokens = 0
    overall = _Means()
    by_kind: dict[str, _Means] = defaultdict(_Means)
    by_distance: dict[str, _Means] = defaultdict(_Means)
    needs_distance = any(head.config.committed_context for head in model.exit_heads)
    total = sum(cache.sequences[index].length for index in indices)
    with tqdm(total=total, unit="tok", desc="evaluate", disable=not show_progress) as progress:
        for batch in _batches(model, cache, indices, batch_tokens):
            num_tokens += len(batch.loss_rows)
            scores = hop_scores(model, batch, random_windows(batch.lengths, batch.spans, max_window, seed))
            overall.add(scores)
            rows = batch.num_loss_rows
            for kind, *parts in zip(batch.kinds, *(score.split(rows, 1) for score in scores.values()), strict=True):
                by_kind[kind].add(dict(zip(scores, parts, strict=True)))
            for distance in distances if needs_distance else ():
                last_known = fixed_distance(batch.lengths, batch.spans, distance)
                by_distance[str(distance)].add(hop_scores(model, batch, last_known))
            progress.update(sum(batch.lengths))
    report: dict[str, Any] = {"num_tokens": num_tokens, "hops": overall.result()}
    report["by_kind"] = {kind: by_kind[kind].result() for kind in sorted(by_kind)}
    if needs_distance:
        report["by_distance"] = {key: means.result() for key, means in by_distance.items()}
    return report


@torch.no_grad()
def hop_scores(
    model: EarlyExitModel,
    batch: Batch,
    last_known: Tensor,  # [T] int64, from `windows`
    rows_per_chunk: int = 256,
) -> dict[str, Tensor]:  # by hop: [2, R] float32, agreement and acceptance of each loss row
    """How every hop between two levels fares on every loss row."""
    context = batch_context(batch, last_known)
    states = [exit_state(model, index, batch, context) for index in range(len(model.heads))]
    union = _union_ids(model)
    union_rows = None if union is None else model.backbone.lm_head_rows(union)
    levels = [*map(str, model.exit_layers), TARGET]
    chunks: dict[str, list[Tensor]] = {f"{a}->{b}": [] for a, b in combinations(levels, 2)}
    for start in range(0, len(batch.loss_rows), rows_per_chunk):
        part = slice(start, start + rows_per_chunk)
        rows = batch.loss_rows[part]
        probs: dict[str, Tensor] = {}
        tops: dict[str, Tensor] = {TARGET: batch.top_token[rows]}
        for index, level in enumerate(levels[:-1]):
            probs[level], tops[level] = _spread(model, index, states[index][part], union)
        target_logits = model.backbone.logits(batch.final[rows], union_rows).float()
        probs[TARGET] = (target_logits - batch.log_normaliser[rows].unsqueeze(-1)).exp()
        for a, b in combinations(levels, 2):
            agreement = (tops[a] == tops[b]).float()
            acceptance = torch.minimum(probs[a], probs[b]).sum(-1)
            chunks[f"{a}->{b}"].append(torch.stack([agreement, acceptance]))
    return {hop: torch.cat(parts, 1) if parts else torch.empty(2, 0) for hop, parts in chunks.items()}


def _spread(
    model: EarlyExitModel,
    index: int,
    state: Tensor,  # [R, D]
    union: Tensor | None,  # [U] int64, sorted; None is the whole vocabulary
) -> tuple[Tensor, Tensor]:  # [R, U] float32, [R] int64
    """Probabilities of one head over the union of the vocabularies, and its most likely token."""
    probs = head_logits(model, index, state).float().softmax(-1)
    top = probs.argmax(-1)
    ids = model.exit_heads[index].draft_vocab_ids
    if ids is None:
        return probs, top
    columns = ids if union is None else torch.searchsorted(union, ids)
    width = model.backbone.vocab_size if union is None else len(union)
    if width > len(ids):
        probs = probs.new_zeros(len(probs), width).index_copy_(1, columns, probs)
    return probs, ids[top]


def _union_ids(model: EarlyExitModel) -> Tensor | None:
    vocabularies = [head.draft_vocab_ids for head in model.exit_heads]
    known = [ids for ids in vocabularies if ids is not None]
    return torch.cat(known).unique() if len(known) == len(vocabularies) else None


def _batches(model: EarlyExitModel, cache: StateCache, indices: Sequence[int], batch_tokens: int) -> Iterator[Batch]:
    chosen: list[int] = []
    num_tokens = 0
    for index in indices:
        chosen.append(index)
        num_tokens += cache.sequences[index].length
        if num_tokens >= batch_tokens:
            yield cache.read(chosen, model.exit_layers, model.backbone)
            chosen, num_tokens = [], 0
    if chosen:
        yield cache.read(chosen, model.exit_layers, model.backbone)


class _Means:
    """Running means of agreement and acceptance, by hop."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.num_rows: dict[str, int] = {}

    def add(self, scores: dict[str, Tensor]) -> None:
        for hop, score in scores.items():
            self.sums[hop] = self.sums.get(hop, torch.zeros(2, dtype=torch.float64)) + score.double().sum(1).cpu()
            self.num_rows[hop] = self.num_rows.get(hop, 0) + score.shape[1]

    def result(self) -> dict[str, dict[str, float]]:
        values = {hop: (total / max(1, self.num_rows[hop])).tolist() for hop, total in self.sums.items()}
        return {hop: {"agreement": round(a, 5), "acceptance": round(b, 5)} for hop, (a, b) in values.items()}
