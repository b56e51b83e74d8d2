"""What an evaluation counts, batch by batch: means of scores, chains of kept tokens, how far confidence is right.

R loss rows; all counts are over loss rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUM_BINS = 10


class Means:
    """Running means of agreement and acceptance, by hop."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._num_rows: dict[str, int] = {}

    def add(self, scores: dict[str, Tensor]) -> None:
        """Add what `hop_scores` gave."""
        for hop, score in scores.items():
            self._sums[hop] = self._sums.get(hop, torch.zeros(2, dtype=torch.float64)) + score.double().sum(1).cpu()
            self._num_rows[hop] = self._num_rows.get(hop, 0) + score.shape[1]

    def result(self) -> dict[str, dict[str, float]]:
        """`{"agreement", "acceptance"}` by hop."""
        values = {hop: (total / max(1, self._num_rows[hop])).tolist() for hop, total in self._sums.items()}
        return {hop: {"agreement": round(a, 5), "acceptance": round(b, 5)} for hop, (a, b) in values.items()}


class Chains:
    """How often the token at a place of a draft is kept when all before it were; a draft may start at any row."""

    def __init__(self, num_places: int) -> None:
        self._reached = torch.zeros(num_places, dtype=torch.int64)
        self._kept = torch.zeros(num_places, dtype=torch.int64)

    def add(
        self,
        agrees: Sequence[Tensor],  # one [R] bool a place: of every row of a sequence, read at that place of a draft
    ) -> None:
        """Add the drafts of one sequence; those that its end cuts count as far as they go."""
        num_rows = len(agrees[0]) if agrees else 0
        alive = torch.ones(num_rows, dtype=torch.bool)
        for place, agree in enumerate(agrees[:num_rows]):
            # The draft that starts at row s has its place k on row s + k.
            alive = alive[: num_rows - place]
            self._reached[place] += alive.sum()
            alive = alive & agree[place:].cpu()
            self._kept[place] += alive.sum()

    def result(self) -> dict[str, list[Any]]:
        """By place: `agreement`, and of how many drafts; as far as any draft came."""
        reached, kept = self._reached.tolist(), self._kept.tolist()
        pairs = [(number, hits) for number, hits in zip(reached, kept, strict=True) if number]
        return {
            "agreement": [round(hits / number, 5) for number, hits in pairs],
            "num_drafts": [number for number, _ in pairs],
        }


class Calibration:
    """How often an exit's most likely token is the target's, by the probability that the exit gives it."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, NUM_BINS, dtype=torch.float64)

    def add(
        self,
        confidence: Tensor,  # [R] float32, 0 to 1
        agreement: Tensor,  # [R] float32, 0 or 1
    ) -> None:
        """Add some rows."""
        bins = (confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1).cpu()
        values = torch.stack([torch.ones_like(confidence), confidence, agreement]).double().cpu()
        self._sums.index_add_(1, bins, values)

    def result(self) -> list[dict[str, float]]:
        """One entry for each tenth of confidence that occurs: `from`, `num_tokens`, mean `confidence`, `agreement`."""
        return [
            {
                "from": place / NUM_BINS,
                "num_tokens": int(number),
                "confidence": round(sure / number, 5),
                "agreement": round(right / number, 5),
            }
            for place, (number, sure, right) in enumerate(self._sums.t().tolist())
            if number
        ]
