"""Prompts: what the base model is asked, so that heads learn from its own answers."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..infer import Engine


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One user message."""

    id: str
    """Unique in its file; decides the split, see `is_held_out`."""
    kind: str
    """What it asks for (code, story, ...); the evaluation reports each kind on its own."""
    text: str
    """The message, without a chat template."""
    content: list[Any] | None = None
    """What the base reads in place of `text`, where that is more than one message: chat messages, or token ids."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file of `{"id", "kind", "prompt"}`; raises ValueError naming the file and the line.

    `id` may be missing (the line number stands for it), and so may `kind` ("other").
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    except FileNotFoundError:
        raise ValueError(f"prompts file {path} does not exist; give a JSONL file with --data") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    prompts = [_parse(line, f"{path} line {number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f'prompts file {path} holds no prompts; each line is {{"id", "kind", "prompt"}}')
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"prompts file {path} has the id {prompt.id!r} twice; ids must be unique")
        seen.add(prompt.id)
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        found = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f'{where} has no text under "prompt" (found: {found})')
    prompt_id = str(record.get("id", f"line-{number}"))
    if not record["prompt"].strip():
        raise ValueError(f"{where}: the prompt {prompt_id!r} is empty")
    return Prompt(id=prompt_id, kind=str(record.get("kind", "other")), text=record["prompt"])


def encode_prompt(engine: Engine, prompt: Prompt) -> list[int]:
    """The token ids of a prompt as the base reads it; ValueError where it cannot."""
    return engine.encode_turn(prompt.text) if prompt.content is None else engine.encode(prompt.content)


def fingerprint_prompts(prompts: Iterable[Prompt]) -> str:
    """Hexadecimal digest of ids, kinds and texts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        more = [] if prompt.content is None else [prompt.content]
        digest.update(json.dumps([prompt.id, prompt.kind, prompt.text, *more]).encode())
    return digest.hexdigest()[:16]


def is_held_out(
    prompt_id: str,
    fraction: float,  # of all prompts, 0 to 1
) -> bool:
    """Whether a prompt, with all of its responses, is kept for evaluation; depends on its id alone."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big") < fraction * 2**64
