"""Colours say whose choice a token was, and change nothing else."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer import Delta
from hispec.infer.detokenizer import Detokenizer
from hispec.infer.palette import COLOURS, RESET, Painter, legend, wants_colour

from .test_detokenizer import TOKENIZERS
from .train_support import build_tokenizer

NAMES = ("draft", "intermediate", "target")


def test_each_token_has_the_colour_of_its_level():
    painter = Painter(build_tokenizer())
    first = Delta("w3 w4 w5", [3, 4, 5], ["target", "draft", "draft"], None)
    last = Delta(" w6", [6, 2], ["intermediate", "target"], "stop")
    target, draft, middle = (COLOURS[name] for name in ("target", "draft", "intermediate"))
    assert painter.paint(first) == f"{target}w3{RESET}{draft} w4 w5{RESET}"
    assert painter.paint(last) == f"{middle} w6{RESET}"


def characters(painted: str) -> list[tuple[str, str]]:
    """Each character with the level whose colour it has."""
    found = []
    for colour, text in re.findall("(\033\\[\\d+m)(.*?)\033\\[0m", painted, flags=re.DOTALL):
        level = next(name for name, value in COLOURS.items() if value == colour)
        found += [(character, level) for character in text]
    return found


@pytest.mark.parametrize("name", ["bytes", "strip", "metaspace"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1), cut=st.integers(0, 3))
def test_each_character_has_the_colour_of_its_token(name, data, sizes, cut):
    """Also where the text is held back, or ends before its tokens do, as at a stop string."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, min(len(tokenizer), 270) - 1), min_size=1, max_size=16))
    levels = [NAMES[token_id % 3] for token_id in ids]
    one_by_one, expected = Detokenizer(tokenizer), []
    for token_id, level in zip(ids, levels, strict=True):
        expected += [(character, level) for character in one_by_one.push([token_id])]
    expected += [(character, levels[-1]) for character in one_by_one.finish()]
    detokenizer, painter, painted, waiting, start = Detokenizer(tokenizer), Painter(tokenizer), "", "", 0
    while start < len(ids):
        stop = start + sizes[start % len(sizes)]
        is_last = stop >= len(ids)
        waiting += detokenizer.push(ids[start:stop]) + (detokenizer.finish() if is_last else "")
        ready, waiting = waiting[: max(0, len(waiting) - cut)], waiting[max(0, len(waiting) - cut) :]
        painted += painter.paint(Delta(ready, ids[start:stop], levels[start:stop], "stop" if is_last else None))
        start = stop
    assert characters(painted) == expected[: max(0, len(expected) - cut)]


def test_the_legend_shows_the_colours_of_the_levels():
    assert f"{COLOURS['draft']}draft" in legend(("draft", "target"))
    assert "intermediate" not in legend(("draft", "target"))


@pytest.mark.parametrize(
    ("when", "is_terminal", "variables", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_there_is_colour(monkeypatch, when, is_terminal, variables, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    assert wants_colour(when, stream) is expected
