"""From the logits of a level to what it says: tokens where the rule is equality, distributions where it is rejection.

R packed rows; V vocabulary; V_d draft vocabulary.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import gumbel_noise, to_probs, to_probs_one_by_one
from .sequence import Sequence


class Rows(NamedTuple):
    """What a level says at some positions, for one sequence."""

    ids: Tensor | None  # [R] int64, its choice, where the rule is equality
    probs: Tensor | None  # [R, V] float32, where the rule is rejection
    first_failure: int | None  # the first row that is not finite, as NaN or infinity; None where all are
    confidence: Tensor | None  # [R] float32, the highest probability of each row, where a policy asks


Bounds = list[tuple[int, int]]
"""Positions `[start, stop)` of each sequence's rows, which lie side by side in a packed batch."""


def read_logits(
    logits: Tensor,  # [R, V or V_d]
    sequences: list[Sequence],
    bounds: Bounds,
    vocab_ids: Tensor | None = None,  # [V_d] int64, where the rows score a draft vocabulary
    *,
    vocab_size: int,
    asks_confidence: bool = False,
    one_by_one: bool = False,  # see `to_probs_one_by_one`
) -> list[Rows]:
    """Apply each sequence's sampling parameters to its rows; rows that are not finite become an even distribution."""
    counts = [stop - start for start, stop in bounds]
    if any(sequence.logits_processor is not None for sequence in sequences):
        logits = _process(logits, sequences, bounds, vocab_ids)
    # Of equal logits the lowest id, as by argmax, which takes four times as long; NaN is greater than all.
    highest, ids = logits.max(-1)
    is_finite = highest.isfinite()
    failures: list[int | None] = [None] * len(sequences)
    if not is_finite.all():
        failures = [_first_false(part) for part in is_finite.split(counts)]
        logits = logits.masked_fill(~is_finite.unsqueeze(-1), 0)
    confidence: Items[Tensor | None] = [None] * len(sequences)
    if asks_confidence:
        confidence = logits.float().softmax(-1).amax(-1).split(counts)
    greedy_ids = (ids if vocab_ids is None else vocab_ids[ids]).split(counts)
    if all(sequence.params.is_greedy for sequence in sequences):
        return [Rows(greedy_ids[b], None, failures[b], confidence[b]) for b in range(len(sequences))]
    probs = (to_probs_one_by_one if one_by_one else to_probs)(logits, *_parameters(sequences, counts, logits.device))
    if vocab_ids is not None:
        probs = torch.zeros(len(probs), vocab_size, device=probs.device).index_copy_(1, vocab_ids, probs)
    rows = []
    for b, (sequence, part) in enumerate(zip(sequences, probs.split(counts), strict=True)):
        if sequence.params.is_greedy:
            rows.append(Rows(greedy_ids[b], None, failures[b], confidence[b]))
        elif sequence.uses_rejection:
            rows.append(Rows(None, part, failures[b], confidence[b]))
        else:
            # The row at position t chooses the token at position t + 1.
            noise = torch.stack([_noise(sequence, position + 1, vocab_size) for position in range(*bounds[b])])
            chosen = (part.log() + noise.to(part.device)).argmax(-1)
            rows.append(Rows(chosen, None, failures[b], confidence[b]))
    return rows


def _process(logits: Tensor, sequences: list[Sequence], bounds: Bounds, vocab_ids: Tensor | None) -> Tensor:
    """Let every sequence's own processor change its rows."""
    parts = list(logits.float().split([stop - start for start, stop in bounds]))
    for b, sequence in enumerate(sequences):
        if sequence.logits_processor is not None:
            num_prompt = len(sequence.prompt_ids)
            parts[b] = sequence.logits_processor(
                parts[b],
                sequence.known_ids(num_prompt),
                len(sequence.token_ids) - num_prompt,
                bounds[b][0],
                vocab_ids,
            )
    return torch.cat(parts)


def _parameters(sequences: list[Sequence], counts: list[int], device: torch.device) -> tuple[Tensor, ...]:  # [R] each
    """What `to_probs` takes; for rows of greedy sequences it means nothing."""
    params = [sequence.params for sequence, count in zip(sequences, counts, strict=True) for _ in range(count)]
    return (
        torch.tensor([1.0 if each.is_greedy else each.temperature for each in params], device=device),
        torch.tensor([each.top_k for each in params], device=device),
        torch.tensor([each.top_p for each in params], device=device),
        torch.tensor([each.min_p for each in params], device=device),
    )


def _noise(sequence: Sequence, position: int, vocab_size: int) -> Tensor:  # [V] float32
    if position not in sequence.noise:
        assert sequence.params.seed is not None
        sequence.noise[position] = gumbel_noise(sequence.params.seed, sequence.index, position, vocab_size)
    return sequence.noise[position]


def _first_false(values: Tensor) -> int | None:
    flags: list[bool] = values.tolist()
    return None if all(flags) else flags.index(False)
