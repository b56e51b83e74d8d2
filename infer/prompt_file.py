"""Prompts from a JSONL file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One usable line of a prompt file."""

    id: Any
    """The line's own `id`, or its number."""
    token_ids: list[int]
    """The prompt as the model reads it."""


def read_prompt_file(
    path: Path, encode: Callable[[Any], list[int]], *, skip_bad: bool
) -> tuple[list[PromptLine], list[str]]:
    """The prompts of a file of `{"prompt": text or messages, "id": optional}` lines, and a sentence for each bad line.

    `encode` turns a prompt into token ids or raises ValueError. Blank lines do not count. Raises ValueError for the
    first bad line unless `skip_bad`, and for a file without a usable line.
    """
    prompts: list[PromptLine] = []
    complaints: list[str] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"the prompt file {path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(line, number, encode))
        except ValueError as error:
            complaint = f"{path} line {number}: {error}"
            if not skip_bad:
                raise ValueError(f"{complaint}; mend the line, or run the others with --skip-bad") from None
            complaints.append(complaint)
    if not prompts:
        raise ValueError(f'{path} has no usable prompt; write one {{"prompt": "..."}} a line')
    return prompts, complaints


def _parse(line: bytes, number: int, encode: Callable[[Any], list[int]]) -> PromptLine:
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError("this is not JSON") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError('there is no "prompt"')
    prompt = record["prompt"]
    is_messages = isinstance(prompt, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in prompt
    )
    if not isinstance(prompt, str) and not (is_messages and prompt):
        raise ValueError('"prompt" must be a text or a list of {"role", "content"} messages')
    return PromptLine(id=record.get("id", number), token_ids=encode(prompt))
