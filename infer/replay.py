"""Every setting that exits allow, gone through answers whose rows were scored: shares and courses from these."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import combinations, product
from typing import Any

from .config import Method
from .cost_model import Acceptance, Setting
from .course import Course, CourseTally, Kept, course_from_dict

MAX_DRAFT_TOKENS = 8
MAX_PROVISIONAL_TOKENS = 8
MIN_DRAFTS = 20
"""Fewer rounds say nothing, and places that fewer drafts have reached neither."""

Answer = Mapping[tuple[int, int], Kept]
"""One answer: by (exit layer, deeper exit layer or depth of the base), where the deeper level keeps what the other one
proposes."""


def replay(answers: Iterable[Answer], exit_layers: Items[int], depth: int) -> Acceptance | None:
    """The courses of every setting over these answers, and the shares by place that long drafts meet.

    None where too few drafts come together.
    """
    settings = list(replayed_settings(exit_layers))
    tallies = [CourseTally(s.num_draft_tokens, _provisional(s), fewest=MIN_DRAFTS) for s in settings]
    for answer in answers:
        for setting, tally in zip(settings, tallies, strict=True):
            deepest = setting.exit_layers[-1]
            drafts = None if setting.method == "single-layer" else answer[setting.exit_layers[0], deepest]
            tally.add(answer[deepest, depth], drafts)
    if any(tally.num_rounds < MIN_DRAFTS for tally in tallies):
        return None
    courses = {setting: tally.result() for setting, tally in zip(settings, tallies, strict=True)}
    hops = hops_of(courses, exit_layers, depth)
    return Acceptance(hops=hops, courses=courses) if all(hops.values()) else None


def replayed_settings(exit_layers: Items[int]) -> Iterable[Setting]:
    """Every exit as the draft, and every pair as draft and intermediate level, with all lengths."""
    lengths = range(1, MAX_DRAFT_TOKENS + 1)
    for exit_layer, number in product(exit_layers, lengths):
        yield _setting((exit_layer,), number, 1)
    for pair, number, provisional in product(
        combinations(exit_layers, 2), lengths, range(1, MAX_PROVISIONAL_TOKENS + 1)
    ):
        yield _setting(pair, number, provisional)


def hops_of(
    courses: Mapping[Setting, Course], exit_layers: Items[int], depth: int
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Shares by place, as the longest drafts meet them."""
    hops = {}
    for exit_layer in exit_layers:
        hops[exit_layer, depth] = courses[_setting((exit_layer,), MAX_DRAFT_TOKENS, 1)].kept
    for pair in combinations(exit_layers, 2):
        hops[pair] = courses[_setting(pair, MAX_DRAFT_TOKENS, 1)].kept_drafts
    return hops


def acceptance_to_list(acceptance: Acceptance) -> list[dict[str, Any]]:
    """The courses, JSON-ready; `acceptance_from_list` reads them."""
    return [
        {
            "exit_layers": list(setting.exit_layers),
            "num_draft_tokens": setting.num_draft_tokens,
            "num_provisional_tokens": setting.num_provisional_tokens,
        }
        | course.to_dict()
        for setting, course in acceptance.courses.items()
    ]


def acceptance_from_list(values: Items[Mapping[str, Any]], exit_layers: Items[int], depth: int) -> Acceptance:
    """From what was JSON; ValueError, KeyError or TypeError where it is not that of every setting of these exits."""
    courses: dict[Setting, Course] = {}
    for each in values:
        exits = tuple(map(int, each["exit_layers"]))
        setting = _setting(exits, int(each["num_draft_tokens"]), int(each["num_provisional_tokens"]))
        courses[setting] = course_from_dict(each)
    wanted = set(replayed_settings(exit_layers))
    if not wanted <= set(courses):
        raise ValueError("courses of some settings are missing")
    courses = {setting: course for setting, course in courses.items() if setting in wanted}
    hops = hops_of(courses, exit_layers, depth)
    if not all(hops.values()):
        raise ValueError("courses of some settings hold no shares")
    return Acceptance(hops=hops, courses=courses)


def _setting(exit_layers: tuple[int, ...], num_drafted: int, num_provisional: int) -> Setting:
    if len(exit_layers) not in (1, 2):
        raise ValueError(f"{len(exit_layers)} exits have no rounds")
    methods: tuple[Method, Method] = ("single-layer", "hispec")
    return Setting(
        method=methods[len(exit_layers) - 1],
        exit_layers=exit_layers,
        num_draft_tokens=num_drafted,
        num_provisional_tokens=num_provisional,
    )


def _provisional(setting: Setting) -> int | None:
    return setting.num_provisional_tokens if setting.method == "hispec" else None
