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


@pytest.mark.parametrize("name", ["bytes", "strip", "metaspace"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1), cut=st.integers(0, 3))
def test_without_its_colours_a_painted_text_is_the_text(name, data, sizes, cut):
    """Also where the text is held back, or ends before its tokens do, as at a stop string."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, min(len(tokenizer), 270) - 1), min_size=1, max_size=16))
    detokenizer, painter, start, painted, text, held = Detokenizer(tokenizer), Painter(tokenizer), 0, "", "", ""
    while start < len(ids):
        new = ids[start : start + sizes[start % len(sizes)]]
        start += len(new)
        is_last = start >= len(ids)
        ready = held + detokenizer.push(new) + (detokenizer.finish() if is_last else "")
        ready, held = ready[: max(0, len(ready) - cut)], ready[max(0, len(ready) - cut) :]
        delta = Delta(ready, new, [NAMES[token_id % 3] for token_id in new], "stop" if is_last else None)
        painted += painter.paint(delta)
        text += ready
    assert re.sub("\033\\[\\d+m", "", painted) == text


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
