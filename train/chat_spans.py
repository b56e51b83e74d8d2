"""Chat spans: a conversation as the model reads it, and which of its tokens are the assistant's.

Most chat templates do not mark what the assistant says. It is found by rendering: what the template adds to the turns
before an answer, and to the question for it, when the answer is there.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from .formats import UnusableRowError, is_answer


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A sequence and the answers in it."""

    token_ids: list[int]
    """The whole sequence."""
    spans: list[tuple[int, int]]
    """`[start, stop)` of each answer, its end-of-turn token included; rising, none empty."""


def tokenize_chat(
    tokenizer: Any,
    turns: Sequence[dict[str, Any]],  # the first not the assistant's
    tools: list[Any] | None = None,
) -> list[Tokens]:
    """The conversation up to its last answer, as one sequence where the template allows it.

    A template that writes earlier turns in another way once later ones are there (Qwen3 drops what was thought) gives
    one sequence for each answer instead: exactly what the model reads when it makes that answer. Raises
    UnusableRowError where the template refuses the turns, or where an answer is not found in what it writes.
    """
    try:
        if "generation" in _template_tags(tokenizer) and (marked := _read_marks(tokenizer, turns, tools)):
            return [marked]
        chat = _Chat(tokenizer, turns, tools)
        places = [place for place, turn in enumerate(turns) if is_answer(turn)]
        if not places:
            raise UnusableRowError("conversations without an answer")
        whole = chat.render(len(turns))
        texts = [chat.locate(place) for place in places]
    except (TemplateError, TypeError) as error:
        # A template adds texts up, and meets what is none.
        raise UnusableRowError(f"conversations that the chat template refuses ({str(error)[:100]})") from None
    if all(whole.startswith(text) for text, _ in texts):
        return [tokenize_spans(tokenizer, texts[-1][0], [(start, len(text)) for text, start in texts])]
    return [tokenize_spans(tokenizer, text, [(start, len(text))]) for text, start in texts]


def tokenize_spans(
    tokenizer: Any,
    text: str,
    spans: Sequence[tuple[int, int]],  # in characters
    add_special_tokens: bool = False,
) -> Tokens:
    """The text's tokens, and of each span those that lie wholly in it; raises UnusableRowError where that is none."""
    if not tokenizer.is_fast:
        token_ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        found = [
            tuple(_num_tokens_before(tokenizer, text, place, token_ids, add_special_tokens) for place in span)
            for span in spans
        ]
    else:
        # Not verbose: what is longer than the model's context is cut later, and that is said.
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
        token_ids, offsets = list(encoded["input_ids"]), _rising(encoded["offset_mapping"])
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
        # A token over a border belongs to neither side: the model never meets it there.
        found = [(bisect_left(starts, start), bisect_right(stops, stop)) for start, stop in spans]
    if not all(start < stop for start, stop in found):
        raise UnusableRowError("answers of no token")
    return Tokens(token_ids=token_ids, spans=[(start, stop) for start, stop in found])


class _Chat:
    """Renders the beginnings of one conversation."""

    def __init__(self, tokenizer: Any, turns: Sequence[dict[str, Any]], tools: list[Any] | None) -> None:
        self._tokenizer, self._turns, self._tools = tokenizer, turns, tools
        self._ends = tuple({*filter(None, tokenizer.all_special_tokens), *_special_tokens(tokenizer).values()})

    def render(self, num_turns: int, question: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(self._turns[:num_turns]), tools=self._tools, tokenize=False, add_generation_prompt=question
        )
        return text

    def locate(self, place: int) -> tuple[str, int]:
        """The conversation to the end of the answer at `place`, and the character where that answer starts."""
        text, before = self.render(place + 1), self.render(place, question=True)
        content = self._turns[place]["content"].strip()
        # Some templates show an answer without the thought before it, or write the thought in another way.
        said = content if content in text else content.rsplit("</think>", 1)[-1].strip()
        if text.startswith(before):
            start = len(before)
        else:
            # The question opens what the finished turn no longer has, such as a thought.
            start = text.find(said, _num_common(text, self.render(place)))
        stop, body = self._trim(text, max(0, start))
        if start < 0 or not body.strip() or said not in body or (content and not said):
            raise UnusableRowError("answers that the chat template changes")
        return text[:stop], start

    def _trim(self, text: str, start: int) -> tuple[int, str]:
        """Where the answer ends, its first end-of-turn token included, and the answer without that."""
        body, stop = text.rstrip(), None
        while len(body) > start and body.endswith(self._ends):
            stop = len(body)
            longest = max((end for end in self._ends if body.endswith(end)), key=len)
            body = body.removesuffix(longest).rstrip()
        return stop or len(body), body[start:]


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Those that templates write, of which `all_special_tokens` knows only the ones with a name."""
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _template_tags(tokenizer: Any) -> set[str]:
    return set(re.findall(r"\{%-?\s*(\w+)", str(tokenizer.chat_template)))


def _read_marks(tokenizer: Any, turns: Sequence[dict[str, Any]], tools: list[Any] | None) -> Tokens | None:
    """The tokens that the template itself marks; None where it marks none."""
    encoded = tokenizer.apply_chat_template(
        list(turns), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    token_ids, mask = list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]
    special = {*tokenizer.all_special_ids, *_special_tokens(tokenizer)}
    spans = []
    for start, stop in mask_spans(mask):
        # Templates differ in whether the mark holds the end of the turn; the model says it.
        includes_end = token_ids[stop - 1] in special
        spans.append((start, stop + (not includes_end and stop < len(token_ids) and token_ids[stop] in special)))
    return Tokens(token_ids=token_ids[: spans[-1][1]], spans=spans) if spans else None


def mask_spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """`[start, stop)` of each run of true values."""
    padded = [False, *map(bool, mask), False]
    edges = [place for place in range(len(mask) + 1) if padded[place] != padded[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _num_common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rising(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets for a search: special tokens that stand for no text have (0, 0) wherever they are."""
    rising, last = [], (0, 0)
    for start, stop in offsets:
        last = (start, stop) if stop > start else (last[1], last[1])
        rising.append(last)
    return rising


def _num_tokens_before(tokenizer: Any, text: str, place: int, token_ids: list[int], special: bool) -> int:
    """For a tokenizer that tells no offsets: the text before is tokenised alone, and must give the same tokens."""
    before = list(tokenizer(text[:place], add_special_tokens=special)["input_ids"])
    if token_ids[: len(before)] != before:
        raise UnusableRowError("answers whose border this tokenizer cannot tell")
    return len(before)
