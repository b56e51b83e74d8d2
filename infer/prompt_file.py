"""Prompts from a JSONL file."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .config import SamplingParams

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
OTHER_FIELDS = frozenset({"id", "kind", "prompt"})


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One usable prompt."""

    id: Any
    """Its own `id`, or its number."""
    token_ids: list[int]
    """The prompt as the model reads it."""
    params: SamplingParams
    """How it is to be answered."""


ReadPrompt = Callable[[Any, Any, dict[str, Any]], PromptLine]
"""From an id, a prompt (text or messages) and sampling parameters by name to a line, or ValueError."""


def read_prompt_file(
    path: Path, read_prompt: ReadPrompt, *, skip_bad: bool, ignore_fields: bool
) -> tuple[list[PromptLine], list[str]]:
    """The prompts of a file of `{"prompt": text or messages, "id": optional}` lines, and a sentence for each bad line.

    A line may also hold sampling parameters. Blank lines do not count. Raises ValueError for the first bad line unless
    `skip_bad`, and for a file without a usable line; unknown fields are bad unless `ignore_fields`.
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
            prompts.append(_parse(line, number, read_prompt, ignore_fields=ignore_fields))
        except ValueError as error:
            complaint = f"{path} line {number}: {error}"
            if not skip_bad:
                raise ValueError(f"{complaint}; mend the line, or run the others with --skip-bad") from None
            complaints.append(complaint)
    if not prompts:
        raise ValueError(f'{path} has no usable prompt; write one {{"prompt": "..."}} a line')
    return prompts, complaints


def _parse(line: bytes, number: int, read_prompt: ReadPrompt, *, ignore_fields: bool) -> PromptLine:
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError("this is not JSON") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError('there is no "prompt"')
    unknown = sorted(record.keys() - SAMPLING_FIELDS - OTHER_FIELDS)
    if unknown and not ignore_fields:
        raise ValueError(f'the field "{unknown[0]}" is unknown; leave it out, or run with --ignore-fields')
    prompt = record["prompt"]
    is_messages = isinstance(prompt, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in prompt
    )
    if not isinstance(prompt, str) and not (is_messages and prompt):
        raise ValueError('"prompt" must be a text or a list of {"role", "content"} messages')
    settings = {name: value for name, value in record.items() if name in SAMPLING_FIELDS}
    bias = settings.get("logit_bias")
    if isinstance(bias, dict):
        # JSON has no other keys than strings.
        settings["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    return read_prompt(record.get("id", number), prompt, settings)
