"""Held-out answers with the scores of every row at every distance, for decoding to be gone through on paper.

R rows of one answer; D distances to the last commit.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..infer.cost_model import Acceptance
from ..infer.course import Kept
from ..infer.replay import acceptance_to_list, replay

GREEDY_SHARE = 0.98
"""An answer is the greedy one where so many of its tokens are the base's first choice; in 16 bits a tie may fall
otherwise."""
MAX_ROWS = 12_000
"""Rows of either kind that are kept and gone through: more change nothing, and take long."""


class ScoredAnswers:
    """Collects answers; `courses` says what every setting's rounds do on them."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._greedy: list[dict[str, Tensor]] = []
        self._others: list[dict[str, Tensor]] = []
        self._sampled: list[dict[str, Tensor]] = []

    def add(
        self,
        scores: Sequence[dict[str, Tensor]],  # by distance, by hop: [2, R], agreement and acceptance
        top_share: float,  # of the answer's tokens, those that are the base's first choice
    ) -> None:
        """One answer."""
        stacked = {hop: torch.stack([part[hop] for part in scores], 1).cpu() for hop in scores[0]}
        agrees = {hop: score[0].bool() for hop, score in stacked.items()}
        _add(self._greedy if top_share >= GREEDY_SHARE else self._others, agrees)
        _add(self._sampled, {hop: self._coins(score[1]) for hop, score in stacked.items()})

    def courses(self, exit_layers: Sequence[int]) -> dict[str, Any]:
        """`{"courses": {"greedy": [...], "sampled": [...]}}`; empty where the answers are too short or too few."""
        greedy = self._replay(self._greedy, exit_layers) or self._replay(self._others, exit_layers)
        sampled = self._replay(self._sampled, exit_layers)
        if greedy is None or sampled is None:
            return {}
        return {"courses": {"greedy": acceptance_to_list(greedy), "sampled": acceptance_to_list(sampled)}}

    def _coins(self, chances: Tensor) -> Tensor:  # both [D, R]
        return torch.rand(chances.shape, generator=self._generator) < chances

    def _replay(self, answers: list[dict[str, Tensor]], exit_layers: Sequence[int]) -> Acceptance | None:
        # The depth is only a name here, which must lie behind all exits.
        depth = max(exit_layers) + 1
        return replay(_by_layers(answers, depth), exit_layers, depth) if answers else None


def _by_layers(answers: list[dict[str, Tensor]], depth: int) -> Iterator[dict[tuple[int, int], Kept]]:
    for answer in answers:
        names = {hop: hop.split("->") for hop in answer}
        yield {
            (int(lower), int(upper) if upper.isdecimal() else depth): answer[hop].tolist()
            for hop, (lower, upper) in names.items()
        }


def _add(answers: list[dict[str, Tensor]], answer: dict[str, Tensor]) -> None:
    num_rows = sum(next(iter(each.values())).shape[1] for each in answers)
    if num_rows < MAX_ROWS:
        answers.append(answer)
