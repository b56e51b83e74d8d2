"""From the logits of a level to what it says: tokens where the rule is equality, distributions where it is rejection.

R packed rows; V vocabulary; V_d draft vocabulary.
"""

import math
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import Highest, highest_step, run_native
from .sampling import build_settings, gumbel_noises, to_probs
from .sequence import Sequence
from .transfer import to_device


class Rows(NamedTuple):
    """What a level says at some positions, for one sequence."""

    ids: list[int]  # R of them, its choice; they mean nothing where the rule is rejection
    probs: Tensor | None  # [R, V] float32, where the rule is rejection
    first_failure: int | None  # the first row that is not finite, as NaN or infinity; None where all are
    confidence: Tensor | None  # [R] float32, the highest probability of each row, where a policy asks


class Reading(NamedTuple):
    """What a level says in all rows of a pass, on the device."""

    ids: Tensor  # [R] int64, its choice; means nothing where the rule is rejection
    probs: Tensor | None  # [R, V] float32; None where all rows are greedy
    highest: Tensor  # [R], the highest logit, which is finite where the row is
    confidence: Tensor | None  # [R] float32, as in `Rows`


Bounds = list[tuple[int, int]]
"""Positions `[start, stop)` of each sequence's rows, which lie side by side in a packed batch."""


class LogitsReader:
    """Reads the logits of one pass; all that the host knows of its rows is on the device before they are computed.

    Rows that are not finite become an even distribution.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        bounds: Bounds,
        vocab_ids: Tensor | None = None,  # [V_d] int64, where the rows score a draft vocabulary
        *,
        device: torch.device,
        vocab_size: int,
        asks_confidence: bool = False,
        one_by_one: bool = False,  # sample each row by itself
        never_waits: bool = False,  # nothing is asked of the device, at the price of an operation more
        token_ids: Items[list[int]] | None = None,  # of each: up to its last row, from behind the prompt; None: known
    ) -> None:
        self._token_ids = token_ids
        self._sequences = sequences
        self._bounds = bounds
        self._vocab_ids = vocab_ids
        self._vocab_size = vocab_size
        self._asks_confidence = asks_confidence
        self._never_waits = never_waits
        self._is_processed = any(sequence.logits_processor is not None for sequence in sequences)
        self._is_greedy = all(sequence.params.is_greedy for sequence in sequences)
        if self._is_greedy:
            return
        owners = [s for s, (start, stop) in zip(sequences, bounds, strict=True) for _ in range(start, stop)]
        params = [sequence.params for sequence in owners]
        # One by one, bit for bit the same whatever rows, with whatever parameters, stand beside it. Otherwise the
        # parameters of one row decide how all are computed, and threads share the sum of a lone row.
        parts = [[each] for each in params] if one_by_one else [params]
        self._settings = [build_settings(part, device) for part in parts]
        self._num_rows = [len(part) for part in parts]
        # The row at position t chooses the token at position t + 1.
        positions = [position + 1 for bound in bounds for position in range(*bound)]
        coupled = [row for row, owner in enumerate(owners) if not owner.params.is_greedy and not owner.uses_rejection]
        noise = _noise([(owners[row], positions[row]) for row in coupled], vocab_size, device)
        self._coupled: list[tuple[slice | Tensor, Tensor]] = []
        if one_by_one:
            self._coupled = [(slice(row, row + 1), part[None]) for row, part in zip(coupled, noise, strict=True)]
        elif coupled:
            are_all = len(coupled) == len(owners)
            self._coupled = [(slice(None) if are_all else to_device(coupled, device), torch.stack(noise))]

    def __call__(self, logits: Tensor, highest: Highest | None = None) -> Reading:  # logits: [R, V or V_d]
        """Apply each sequence's sampling parameters to its rows; `highest` may be known of the logits as they are."""
        if self._is_processed:
            logits = _process(logits, self._sequences, self._bounds, self._vocab_ids, self._token_ids)
        is_plain = self._is_greedy and not self._is_processed
        found = highest if is_plain and highest is not None else self._find_highest(logits)
        ids, values, confidence = found
        if self._is_greedy:
            return Reading(ids, None, values, confidence if self._asks_confidence else None)
        logits = self._evened(logits, values)
        parts = zip(logits.split(self._num_rows), self._settings, strict=True)
        probs_of = [to_probs(part, *settings) for part, settings in parts]
        probs = probs_of[0] if len(probs_of) == 1 else torch.cat(probs_of)
        if self._vocab_ids is not None:
            whole = torch.zeros(len(probs), self._vocab_size, device=probs.device)
            probs = whole.index_copy_(1, self._vocab_ids, probs)
        for rows, noise in self._coupled:
            ids[rows] = (probs[rows].log() + noise).argmax(-1)
        return Reading(ids, probs, values, confidence)

    def _find_highest(self, logits: Tensor) -> Highest:
        native = highest_step(logits, self._vocab_ids, with_probabilities=self._asks_confidence)
        if native is not None:
            return run_native(native)
        # Of equal logits the lowest id, as by argmax, which takes four times as long; NaN is greater than all.
        values, ids = logits.max(-1)
        if self._vocab_ids is not None:
            ids = self._vocab_ids[ids]
        if not self._asks_confidence:
            return Highest(ids, values, None)
        return Highest(ids, values, self._evened(logits, values).float().softmax(-1).amax(-1))

    def _evened(self, logits: Tensor, highest: Tensor) -> Tensor:  # [R, V], [R] -> [R, V]
        """The logits with zeros in rows whose highest value is not finite."""
        is_finite = highest.isfinite()
        if self._never_waits or not is_finite.all():
            return logits.masked_fill(~is_finite.unsqueeze(-1), 0)
        return logits


def read_logits(
    logits: Tensor,  # [R, V or V_d]
    sequences: list[Sequence],
    bounds: Bounds,
    vocab_ids: Tensor | None = None,  # as the other options, see `LogitsReader`
    *,
    vocab_size: int,
    asks_confidence: bool = False,
    one_by_one: bool = False,
    highest: Highest | None = None,  # where it is known
) -> list[Rows]:
    """What a level says to each sequence."""
    reader = LogitsReader(
        sequences,
        bounds,
        vocab_ids,
        device=logits.device,
        vocab_size=vocab_size,
        asks_confidence=asks_confidence,
        one_by_one=one_by_one,
    )
    ids, probs, highest_values, confidence = reader(logits, highest)
    counts = [stop - start for start, stop in bounds]
    nothing: list[Tensor | None] = [None] * len(sequences)
    probs_of: Items[Tensor | None] = nothing if probs is None else probs.split(counts)
    confidence_of: Items[Tensor | None] = nothing if confidence is None else confidence.split(counts)
    all_ids, are_finite = ids.tolist(), [math.isfinite(value) for value in highest_values.tolist()]
    rows = []
    for b, (sequence, (start, stop)) in enumerate(zip(sequences, pairwise(accumulate(counts, initial=0)), strict=True)):
        failure = None if all(are_finite[start:stop]) else are_finite.index(False, start) - start
        own_probs = probs_of[b] if sequence.uses_rejection else None
        rows.append(Rows(all_ids[start:stop], own_probs, failure, confidence_of[b]))
    return rows


def _process(
    logits: Tensor,
    sequences: list[Sequence],
    bounds: Bounds,
    vocab_ids: Tensor | None,
    token_ids: Items[list[int]] | None,
) -> Tensor:
    """Let every sequence's own processor change its rows."""
    parts = list(logits.float().split([stop - start for start, stop in bounds]))
    for b, sequence in enumerate(sequences):
        if sequence.logits_processor is not None:
            num_prompt = len(sequence.prompt_ids)
            parts[b] = sequence.logits_processor(
                parts[b],
                sequence.known_ids(num_prompt) if token_ids is None else token_ids[b],
                len(sequence.token_ids) - num_prompt,
                bounds[b][0],
                vocab_ids,
            )
    return torch.cat(parts)


def _noise(
    places: list[tuple[Sequence, int]], vocab_size: int, device: torch.device
) -> list[Tensor]:  # [V] float32 each
    """Of sequences at positions; what a level before has drawn is there."""
    missing = [(sequence, position) for sequence, position in places if position not in sequence.noise]
    keys = [(_seed(sequence), sequence.index, position) for sequence, position in missing]
    for (sequence, position), noise in zip(missing, gumbel_noises(keys, vocab_size), strict=True):
        sequence.noise[position] = to_device(noise, device)
    return [sequence.noise[position] for sequence, position in places]


def _seed(sequence: Sequence) -> int:
    assert sequence.params.seed is not None
    return sequence.params.seed
