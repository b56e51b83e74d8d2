"""Draws tokens at the lowest level, one after the other on the device.

B sequences; R of them whose rule is rejection.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .at_once import DraftsAtOnce, Judged
from .draft_plan import DraftPlan
from .logits_reader import LogitsReader, Reading
from .model_runner import ModelRunner
from .sampling import draw
from .sequence import Proposal, Sequence
from .transfer import to_device


class _Question(NamedTuple):
    """What is asked of the logits of one token."""

    reader: LogitsReader
    rejecting: Tensor | slice  # [R] int64
    uniforms: Tensor | None  # [R]; None where there are none of those


class Drafter:
    """Draws drafts of several tokens; all that the host knows is on the device before the first is drawn."""

    def __init__(
        self,
        runner: ModelRunner,
        generator: torch.Generator,
        *,
        asks_confidence: bool,
        one_by_one: bool,  # sample each row by itself
        origin: int = 0,  # of its proposals
    ) -> None:
        self._runner = runner
        self._generator = generator
        self._asks_confidence = asks_confidence
        self._origin = origin
        self._reader = partial(
            LogitsReader,
            device=runner.model.backbone.device,
            vocab_size=runner.model.backbone.vocab_size,
            asks_confidence=asks_confidence,
            one_by_one=one_by_one,
            never_waits=True,
        )

    def draft(
        self,
        sequences: list[Sequence],
        counts: list[int],
        least: list[float] | None = None,
        judging: list[Sequence] | None = None,
    ) -> tuple[list[list[Proposal]], Judged | None]:
        """`counts[b]` tokens of each sequence, at least one; `counts` must not rise.

        Only where each is one may the choice of a token depend on the proposed tokens before it. Of a lone sequence
        fewer where `least` is given: no other token behind k + 1 that stand with a probability of less than `least[k]`,
        and maybe a single one. `judging` are the same sequences where the target is asked about these drafts and
        nothing else: what it says, if it was asked at once.
        """
        if all(sequence.params.is_greedy and sequence.logits_processor is None for sequence in sequences):
            found = self._draft_at_once(sequences, counts, least, judging)
            if found is None and least is not None:
                found = self._draft_at_once(sequences, [1], None, None)
            if found is not None:
                return self._proposals(found), found.judged
        return self._draft_one_by_one(sequences, counts if least is None else [1]), None

    def _draft_at_once(
        self, sequences: list[Sequence], counts: list[int], least: list[float] | None, judging: list[Sequence] | None
    ) -> DraftsAtOnce | None:
        return self._runner.draft_at_once(
            sequences, counts, _nums_active(counts), least, judging=judging, with_probabilities=self._asks_confidence
        )

    def _proposals(self, drafts: DraftsAtOnce) -> list[list[Proposal]]:
        confidences = drafts.confidences or [[1.0] * len(ids) for ids in drafts.token_ids]
        return [
            [Proposal(token_id, None, confidence, self._origin) for token_id, confidence in zip(*draft, strict=True)]
            for draft in zip(drafts.token_ids, confidences, strict=True)
        ]

    def _draft_one_by_one(self, sequences: list[Sequence], counts: list[int]) -> list[list[Proposal]]:
        lengths, nums_active = [sequence.num_known for sequence in sequences], _nums_active(counts)
        questions = self._questions(sequences, lengths, nums_active)
        plan = self._runner.plan_draft(sequences, counts, nums_active)
        readings = self._draw(plan, questions)
        ids = _to_host([reading.ids for reading in readings])
        confidences = [[1.0] * number for number in plan.nums_active]
        if self._asks_confidence:
            confidences = _to_host([reading.confidence for reading in readings if reading.confidence is not None])
        drafts: list[list[Proposal]] = []
        for b, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            draft = []
            for place, reading in enumerate(readings[:count]):
                probs = reading.probs[b] if sequence.uses_rejection and reading.probs is not None else None
                draft.append(Proposal(ids[place][b], probs, confidences[place][b], self._origin))
            drafts.append(draft)
        return drafts

    def _draw(self, plan: DraftPlan, questions: list[_Question]) -> list[Reading]:
        """What is drawn, and from what; nothing here waits for the device, and nothing is sent to it."""
        readings: list[Reading] = []
        ids = None
        for place, (reader, rejecting, uniforms) in enumerate(questions):
            reading = reader(self._runner.draft(plan, place, ids))
            ids = reading.ids
            if uniforms is not None:
                assert reading.probs is not None
                ids[rejecting] = draw(reading.probs[rejecting], uniforms)
            readings.append(reading)
        return readings

    def _questions(self, sequences: list[Sequence], lengths: list[int], nums_active: list[int]) -> list[_Question]:
        device, vocab_ids = self._runner.device, self._runner.parts.vocab_ids(0)
        rejecting = [b for b, sequence in enumerate(sequences) if sequence.uses_rejection]
        places: Tensor | slice = slice(None)
        if 0 < len(rejecting) < len(sequences):
            places = to_device(rejecting, device)
        questions = []
        for place, number in enumerate(nums_active):
            # The row at the newest known position chooses the first token.
            bounds = [(length + place - 1, length + place) for length in lengths[:number]]
            reader = self._reader(sequences[:number], bounds, vocab_ids)
            uniforms = None
            if num_rejecting := sum(b < number for b in rejecting):
                uniforms = to_device(torch.rand(num_rejecting, generator=self._generator), device)
            questions.append(
                _Question(reader, places if isinstance(places, slice) else places[:num_rejecting], uniforms)
            )
        return questions


def _nums_active(counts: list[int]) -> list[int]:
    """By token: how many sequences draw it."""
    return [sum(count > place for count in counts) for place in range(counts[0])]


def _to_host(parts: list[Tensor]) -> list[list]:
    """The values of several tensors, by one transfer."""
    if len(parts) == 1:
        return [parts[0].tolist()]
    values = torch.cat(parts).tolist()
    return [values[start:stop] for start, stop in pairwise([0, *accumulate(map(len, parts))])]
