"""Courses: what the rounds of a setting do, counted over texts whose every row was scored at every distance.

D distances to the last commit, 1 first; R rows of an answer, each of which chooses the next token.

A mean over all places of a text says too much: long drafts skip what is easy, so that rounds begin where it is hard
more often than anywhere. So the loop of `Hierarchy` is gone through, from the beginning of each answer, over what is
kept where. Greedy rounds over greedy answers are found exactly, but for what the intermediate level does behind a token
that the target will refuse: there the rows of the answer stand in for those of a text that nobody has written.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Any

Kept = Items[Items[bool]]
"""`[D][R]`: whether a token of row r, read so far from the last commit, is kept by the level above; distances behind
the last are like it."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The rounds of one setting, on average."""

    num_rounds: int
    """How many were counted."""
    tokens_per_round: float
    """Committed tokens, the target's own included."""
    num_waiting: float
    """Tokens that wait for the target when it verifies."""
    kept: tuple[float, ...]
    """By place among these: the share that the target keeps, where it kept all before."""
    verifications: tuple[float, ...] = ()
    """`[j]`: the share of rounds in which the intermediate level verifies at least j + 1 times."""
    kept_drafts: tuple[float, ...] = ()
    """By place in a draft: the share that the intermediate level keeps, where it kept all before."""

    def __post_init__(self) -> None:
        shares = (*self.kept, *self.verifications, *self.kept_drafts)
        if self.num_rounds < 1 or not self.tokens_per_round >= 1 or not self.num_waiting >= 0:
            raise ValueError("a course has no rounds, or rounds without tokens")
        if not all(0 <= share <= 1 for share in shares) or (self.verifications and self.verifications[0] != 1):
            raise ValueError("a course has a share that is none")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `course_from_dict` reads it."""
        return {
            name: value if isinstance(value, int) else _rounded(value)
            for name, value in asdict(self).items()
            if value != ()
        }


def course_from_dict(values: Mapping[str, Any]) -> Course:
    """From what was JSON; ValueError, KeyError or TypeError for anything but a course."""
    lists = ("kept", "verifications", "kept_drafts")
    return Course(
        num_rounds=int(values["num_rounds"]),
        tokens_per_round=float(values["tokens_per_round"]),
        num_waiting=float(values["num_waiting"]),
        **{name: tuple(map(float, values.get(name, ()))) for name in lists},
    )


class CourseTally:
    """Goes through answers by one setting, and counts."""

    def __init__(
        self,
        num_draft_tokens: int,
        num_provisional_tokens: int | None = None,  # None where the target verifies drafts
        *,
        fewest: int = 1,  # drafts that must have reached a place that has a share
    ) -> None:
        self._num_drafted = num_draft_tokens
        self._num_provisional = num_provisional_tokens
        self._fewest = fewest
        self.num_rounds = 0
        self._num_tokens = self._num_waiting = 0
        self._verified: list[int] = []
        self._by_target = Places()
        self._by_middle = Places()

    def add(
        self,
        kept: Kept,  # by the target, of what the level below it proposes
        kept_drafts: Kept | None = None,  # by the intermediate level, if there is one
    ) -> None:
        """One answer; its end cuts drafts as the length limit of a request does."""
        num_rows = len(kept[0]) if kept else 0
        start = 0
        while start < num_rows:
            room = num_rows - start - 1
            if self._num_provisional is None:
                waiting = min(self._num_drafted, room)
            else:
                assert kept_drafts is not None
                waiting = self._wait(kept_drafts, start, room, self._num_provisional)
            number = self._by_target.count(kept, start, 0, waiting)
            self.num_rounds += 1
            self._num_waiting += waiting
            self._num_tokens += number + 1
            start += number + 1

    def _wait(self, kept_drafts: Kept, start: int, room: int, wanted: int) -> int:
        """How many tokens wait for the target in the round that begins at row `start`."""
        waiting = num_verified = 0
        while waiting < min(wanted, room):
            length = min(self._num_drafted, room - waiting - 1)
            waiting += self._by_middle.count(kept_drafts, start, waiting, length) + 1
            self._verified.extend([0] * (num_verified + 1 - len(self._verified)))
            self._verified[num_verified] += 1
            num_verified += 1
        return waiting

    def result(self) -> Course:
        """The means; ValueError where no round was counted."""
        # A round at the very end of an answer has no room for a draft, and its intermediate level nothing to verify.
        most = max(self._verified, default=0)
        return Course(
            num_rounds=self.num_rounds,
            tokens_per_round=self._num_tokens / max(1, self.num_rounds),
            num_waiting=self._num_waiting / max(1, self.num_rounds),
            kept=self._by_target.shares(self._fewest),
            verifications=tuple(number / most for number in self._verified),
            kept_drafts=self._by_middle.shares(self._fewest),
        )


class Places:
    """Of drafts: how many came so far, and how many were kept there."""

    def __init__(self) -> None:
        self._reached: list[int] = []
        self._kept: list[int] = []

    def count(self, kept: Kept, start: int, behind: int, length: int) -> int:
        """Add the draft of `length` tokens `behind` the first row of the round, `start`; how many are kept."""
        for place in range(length):
            if place == len(self._reached):
                self._reached.append(0)
                self._kept.append(0)
            distance = min(behind + place, len(kept) - 1)
            self._reached[place] += 1
            if not kept[distance][start + behind + place]:
                return place
            self._kept[place] += 1
        return length

    def shares(self, fewest: int) -> tuple[float, ...]:
        """By place, as far as so many drafts came."""
        pairs = zip(self._kept, self._reached, strict=True)
        return tuple(number / reached for number, reached in pairs if reached >= fewest)


def _rounded(value: Any) -> Any:
    return [round(each, 5) for each in value] if isinstance(value, tuple) else round(value, 5)
