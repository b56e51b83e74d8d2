"""Evaluation on held-out responses: how often a level's choice survives the next one.

R loss rows; D hidden size; U the union of the heads' vocabularies.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..heads import EarlyExitModel
from .cache import Batch, StateSource
from .exit_states import batch_context, exit_state, head_logits
from .responses import Response
from .scored_answers import ScoredAnswers
from .tally import Calibration, Chains, Means
from .windows import fixed_distance, random_windows

TARGET = "target"
DISTANCES = tuple(range(1, 9))
"""Rows back to the committed context, for each of which the final measurement has figures of its own."""


class Scores(NamedTuple):
    """How every loss row fares."""

    hops: dict[str, Tensor]
    """By hop: `[2, R]` float32, agreement and acceptance."""
    confidence: dict[str, Tensor]
    """By exit: `[R]` float32, the probability of its most likely token."""


def evaluate(
    model: EarlyExitModel,
    cache: StateSource,
    indices: Sequence[int],  # sequences of the cache
    *,
    max_window: int,
    distances: Sequence[int] = DISTANCES,
    batch_tokens: int = 4096,
    seed: int = 0,
    show_progress: bool = False,
) -> dict[str, Any]:
    """How often a level's choice survives a deeper one, for every pair of levels, JSON-ready.

    Hops are named "4->8", "4->target". Each has its `agreement` (same most likely token: what greedy decoding
    accepts) and its `acceptance` (expected, `sum min(p, q)` at temperature 1).

    - `num_tokens`: loss rows; all below are means over these.
    - `hops`: `{hop: {"agreement", "acceptance"}}`, with windows as in training; `by_kind`: `{kind: hops}`, and
      `num_tokens_by_kind`.
    - `calibration`: `{exit: [{"from", "num_tokens", "confidence", "agreement"}]}`, an entry for each tenth of
      confidence with its mean and its agreement with the target; windows as in training.
    - `by_distance`: `{distance: hops}`: every row is as far from its committed context as the key says. Without
      committed context all distances are the same.
    - `by_place`: `{hop: {"agreement": [...], "num_drafts": [...]}}`: the share of tokens at place 1, 2, ... of a
      draft that the deeper level agrees with when it agreed with all before; place k is read at distance k. The
      tokens between are the response's own: those of greedy decoding where the response is the greedy one. A draft may
      start at any row, so these are not what a decoder meets: it starts most often where drafts fail.
    - `courses`: `{"greedy": [...], "sampled": [...]}`, by setting (exits and lengths) what its rounds do when they
      follow each response from its beginning, see `hispec.infer.course`: `greedy` by agreement, on the responses that
      are greedy ones if there are any; `sampled` by coins of the expected acceptance. Left out where there are fewer
      than 20 rounds.

    Without `distances` the last three are left out; places go as far as distances count on from 1.
    """
    num_tokens: dict[str, int] = defaultdict(int)
    overall = Means()
    by_kind: dict[str, Means] = defaultdict(Means)
    by_distance: dict[str, Means] = defaultdict(Means)
    num_places = next((place for place, distance in enumerate(distances) if distance != place + 1), len(distances))
    by_place: dict[str, Chains] = defaultdict(lambda: Chains(num_places))
    calibration: dict[str, Calibration] = defaultdict(Calibration)
    answered = ScoredAnswers(seed)
    needs_distance = any(head.config.committed_context for head in model.exit_heads)
    total = sum(cache.sequences[index].length for index in indices)
    with tqdm(total=total, unit="tok", desc="evaluate", disable=not show_progress) as progress:
        for chosen, batch in _batches(model, cache, indices, batch_tokens):
            scores = level_scores(model, batch, random_windows(batch.lengths, batch.spans, max_window, seed))
            overall.add(scores.hops)
            for name, confidence in scores.confidence.items():
                calibration[name].add(confidence, scores.hops[f"{name}->{TARGET}"][0])
            rows = batch.num_loss_rows
            for kind, number, part in zip(batch.kinds, rows, _by_sequence(scores.hops, rows), strict=True):
                num_tokens[kind] += number
                by_kind[kind].add(part)
            at_distance = []
            for distance in distances:
                last_known = fixed_distance(batch.lengths, batch.spans, distance)
                at_distance.append(hop_scores(model, batch, last_known) if needs_distance else scores.hops)
                by_distance[str(distance)].add(at_distance[-1])
            # A draft does not go on into the next answer of a conversation.
            rows = [max(0, stop - start - 1) for answers in batch.spans for start, stop in answers]
            by_answer = list(zip(*(_by_sequence(hops, rows) for hops in at_distance[:num_places]), strict=True))
            top_shares = _top_shares([cache.sequences[index] for index in chosen], batch) if by_answer else []
            for parts, top_share in zip(by_answer, top_shares, strict=True):
                for hop in scores.hops:
                    by_place[hop].add([part[hop][0].bool() for part in parts])
                answered.add(parts, top_share)
            progress.update(sum(batch.lengths))
    report: dict[str, Any] = {"num_tokens": sum(num_tokens.values()), "hops": overall.result()}
    report["by_kind"] = {kind: by_kind[kind].result() for kind in sorted(by_kind)}
    report["num_tokens_by_kind"] = {kind: num_tokens[kind] for kind in sorted(by_kind)}
    report["calibration"] = {name: calibration[name].result() for name in calibration}
    if distances:
        report["by_distance"] = {key: means.result() for key, means in by_distance.items()}
        report["by_place"] = {hop: chains.result() for hop, chains in by_place.items()}
        report |= answered.courses(model.exit_layers)
    return report


def hop_scores(
    model: EarlyExitModel,
    batch: Batch,
    last_known: Tensor,  # [T] int64, from `windows`
    rows_per_chunk: int = 256,
) -> dict[str, Tensor]:  # by hop: [2, R] float32, agreement and acceptance of each loss row
    """How every hop between two levels fares on every loss row."""
    return level_scores(model, batch, last_known, rows_per_chunk).hops


@torch.no_grad()
def level_scores(
    model: EarlyExitModel,
    batch: Batch,
    last_known: Tensor,  # [T] int64, from `windows`
    rows_per_chunk: int = 256,
) -> Scores:
    """How every hop between two levels fares on every loss row, and how sure the exits are."""
    context = batch_context(batch, last_known)
    states = [exit_state(model, index, batch, context) for index in range(len(model.heads))]
    union = _union_ids(model)
    union_rows = None if union is None else model.backbone.lm_head_rows(union)
    levels = [*map(str, model.exit_layers), TARGET]
    chunks: dict[str, list[Tensor]] = {f"{a}->{b}": [] for a, b in combinations(levels, 2)}
    confidence: dict[str, list[Tensor]] = {level: [] for level in levels[:-1]}
    for start in range(0, len(batch.loss_rows), rows_per_chunk):
        part = slice(start, start + rows_per_chunk)
        rows = batch.loss_rows[part]
        probs: dict[str, Tensor] = {}
        tops: dict[str, Tensor] = {TARGET: batch.top_token[rows]}
        for index, level in enumerate(levels[:-1]):
            probs[level], tops[level] = _spread(model, index, states[index][part], union)
            confidence[level].append(probs[level].amax(-1))
        target_logits = model.backbone.logits(batch.final[rows], union_rows).float()
        probs[TARGET] = (target_logits - batch.log_normaliser[rows].unsqueeze(-1)).exp()
        for a, b in combinations(levels, 2):
            agreement = (tops[a] == tops[b]).float()
            acceptance = torch.minimum(probs[a], probs[b]).sum(-1)
            chunks[f"{a}->{b}"].append(torch.stack([agreement, acceptance]))
    return Scores(
        {hop: torch.cat(parts, 1) if parts else torch.empty(2, 0) for hop, parts in chunks.items()},
        {level: torch.cat(parts) if parts else torch.empty(0) for level, parts in confidence.items()},
    )


def _by_sequence(
    hops: dict[str, Tensor],  # [2, R]
    num_rows: list[int],
) -> list[dict[str, Tensor]]:  # for each sequence, by hop: [2, its rows]
    parts = zip(*(score.split(num_rows, 1) for score in hops.values()), strict=True)
    return [dict(zip(hops, part, strict=True)) for part in parts]


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


def _top_shares(sequences: Sequence[Response], batch: Batch) -> list[float]:
    """Of every answer: the share of its tokens, behind the first one, that are the base's first choice."""
    top = batch.top_token.cpu()
    shares = []
    begin = 0
    for sequence in sequences:
        ids = torch.tensor([*sequence.prompt_token_ids, *sequence.token_ids])
        for start, stop in sequence.spans:
            chosen = top[begin + start : begin + stop - 1] == ids[start + 1 : stop]
            shares.append(chosen.float().mean().item() if len(chosen) else 0.0)
        begin += sequence.length
    return shares


def _batches(
    model: EarlyExitModel, cache: StateSource, indices: Sequence[int], batch_tokens: int
) -> Iterator[tuple[list[int], Batch]]:
    """Which sequences, and what is cached of them."""
    chosen: list[int] = []
    num_tokens = 0
    for index in indices:
        chosen.append(index)
        num_tokens += cache.sequences[index].length
        if num_tokens >= batch_tokens:
            yield chosen, cache.read(chosen, model.exit_layers, model.backbone)
            chosen, num_tokens = [], 0
    if chosen:
        yield chosen, cache.read(chosen, model.exit_layers, model.backbone)
