"""Prompt rows: the rows of a data set as prompts that the base answers."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

from tqdm import tqdm

from ..infer import Engine
from .dataset import Rows
from .formats import Example, Format, UnusableRowError, question_of, read_example
from .prompts import Prompt, encode_prompt


def collect_prompts(
    rows: Rows, found: Format, engine: Engine, *, max_prompts: int, max_length: int
) -> tuple[list[Prompt], dict[str, int]]:
    """At most `max_prompts` prompts of at most `max_length` tokens, and the rows dropped by reason."""
    prompts: dict[str, Prompt] = {}
    has_template = getattr(engine.tokenizer, "chat_template", None) is not None
    dropped: Counter[str] = Counter()
    for _, row in tqdm(rows, unit="row", desc="prompts", delay=2):
        try:
            prompt = _as_prompt(read_example(row, found), has_template)
            # The row's id is that of its opening, and two conversations may open alike.
            known = prompts.get(prompt.id)
            if known is not None and (known.text, known.content) != (prompt.text, prompt.content):
                more = hashlib.sha256(json.dumps([prompt.text, prompt.content]).encode()).hexdigest()[:8]
                prompt = replace(prompt, id=f"{prompt.id}-{more}")
            if prompt.id in prompts:
                raise UnusableRowError("rows that ask the same again")
            _check_prompt(engine, prompt, max_length)
        except UnusableRowError as error:
            dropped[str(error)] += 1
            continue
        prompts[prompt.id] = prompt
        if len(prompts) == max_prompts:
            break
    return list(prompts.values()), dict(dropped)


def _check_prompt(engine: Engine, prompt: Prompt, max_length: int) -> None:
    try:
        num_tokens = len(encode_prompt(engine, prompt))
    except ValueError as error:
        # What an engine says of a length is another sentence for each.
        too_long = "context holds" in str(error)
        raise UnusableRowError(
            "prompts longer than the model's context" if too_long else f"prompts that cannot be read ({error})"
        ) from None
    if num_tokens > max_length:
        raise UnusableRowError(f"prompts longer than {max_length} tokens")


def _as_prompt(example: Example, has_template: bool) -> Prompt:
    if example.token_ids is not None:
        num_asked = (example.mask or [True]).index(True) if any(example.mask or [True]) else len(example.token_ids)
        if num_asked == 0:
            raise UnusableRowError("rows without tokens of a prompt")
        return Prompt(id=example.id, kind=example.kind, text="", content=example.token_ids[:num_asked])
    assert example.turns is not None
    if example.tools is not None:
        raise UnusableRowError("conversations with tools, which the base is not told of")
    question = question_of(example.turns)
    if not has_template:
        text = "\n\n".join(turn["content"] for turn in question)
        return Prompt(id=example.id, kind=example.kind, text=text)
    text = question[-1]["content"]
    return Prompt(id=example.id, kind=example.kind, text=text, content=question if len(question) > 1 else None)
