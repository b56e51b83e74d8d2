"""The preview: one sequence with its loss mask, so that a wrong mask is seen before hours of training."""

from typing import Any, TextIO

from ..infer.palette import COLOURS, RESET, wants_colour
from .responses import Response

MAX_TOKENS = 400
"""Tokens shown; of a longer sequence those around its first answer."""


def show_sample(sequence: Response, tokenizer: Any, output: TextIO) -> None:
    """Print the sequence; what is trained on is green, or where colours are not wanted between `[[` and `]]`."""
    use_colour = wants_colour("auto", output)
    marks = (COLOURS["draft"], RESET) if use_colour else ("[[", "]]")
    how = "in green" if use_colour else "between [[ and ]]"
    num_read = sequence.length - sequence.num_answer_tokens
    print(
        f"sample {sequence.prompt_id} ({sequence.kind}): {sequence.num_answer_tokens} tokens {how} are trained on, "
        f"{num_read} are only read",
        file=output,
    )
    text = paint(sequence, tokenizer, *marks)
    # A terminal of another encoding must not end a run.
    encoding = getattr(output, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=output, flush=True)


def paint(sequence: Response, tokenizer: Any, start_mark: str, stop_mark: str) -> str:
    """The sequence as text with its special tokens, each answer between two marks."""
    token_ids = [*sequence.prompt_token_ids, *sequence.token_ids]
    begin = max(0, min(sequence.spans[0][0] - MAX_TOKENS // 2, len(token_ids) - MAX_TOKENS))
    end = min(len(token_ids), begin + MAX_TOKENS)
    parts, place = ["... " if begin else ""], begin
    for start, stop in sequence.spans:
        start, stop = min(start, end), min(stop, end)
        parts.append(_decode(tokenizer, token_ids[place:start]))
        if start < stop:
            parts.append(f"{start_mark}{_decode(tokenizer, token_ids[start:stop])}{stop_mark}")
        place = stop
    return "".join([*parts, " ..." if end < len(token_ids) else ""])


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""
    return text
