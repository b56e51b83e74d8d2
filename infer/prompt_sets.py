"""Sets of prompts for a benchmark: files, and the five of the method's paper from the hub."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from .config import SamplingParams
from .prompt import Prompt
from .prompt_file import PromptLine, read_prompt_file

Encode = Callable[[Prompt], list[int]]
"""From a prompt to the token ids that the model reads; ValueError where it cannot."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts of one kind."""

    name: str
    """A file's name without its ending, or the name of a hub set."""
    ids: list[str]
    """One for each prompt."""
    token_ids: list[list[int]]
    """The prompts as the model reads them."""
    num_skipped: int = 0
    """Prompts before the last one taken that the model's context is too short for."""

    @property
    def digest(self) -> str:
        """Hexadecimal, of all token ids."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Where a set lies on the hub, and how its rows become prompts."""

    repo: str
    split: str
    to_prompt: Callable[[Mapping[str, Any]], str | None]
    """A row's prompt; None leaves the row out."""
    config: str | None = None
    revision: str | None = None
    data_files: str | None = None


def _first_question(row: Mapping[str, Any]) -> str | None:
    turns = row["conversations"]
    is_question = bool(turns) and turns[0]["from"] in ("human", "user") and turns[0]["value"].strip()
    return turns[0]["value"] if is_question else None


HUB_SETS = {
    "sharegpt": HubSet(
        repo="anon8231489123/ShareGPT_Vicuna_unfiltered",
        split="train",
        data_files="ShareGPT_V3_unfiltered_cleaned_split.json",
        to_prompt=_first_question,
    ),
    "cnn_dm": HubSet(
        repo="abisee/cnn_dailymail",
        config="3.0.0",
        split="test",
        to_prompt=lambda row: f"Summarize: {row['article']}",
    ),
    "humaneval": HubSet(repo="openai/openai_humaneval", split="test", to_prompt=lambda row: row["prompt"]),
    "gsm8k": HubSet(repo="openai/gsm8k", config="main", split="test", to_prompt=lambda row: row["question"]),
    # The repository's main branch is a script, which `datasets` no longer runs; this branch is the hub's own copy.
    "xsum": HubSet(
        repo="EdinburghNLP/xsum",
        split="test",
        revision="refs/convert/parquet",
        to_prompt=lambda row: f"Summarize in one sentence: {row['document']}",
    ),
}
"""The sets of the HiSpec paper, by name."""


def read_prompt_set(
    name: str,  # a JSONL file, or one of `HUB_SETS`
    encode: Encode,
    *,
    limit: int,  # prompts to take
    max_length: int,  # tokens that a prompt may have, so that its answer fits into the model's context
) -> PromptSet:
    """The first `limit` prompts that are short enough.

    Raises ValueError for a name that is neither, a file with a bad line, a hub that cannot be reached, and a set
    without a prompt that fits.
    """
    prompts: Iterator[tuple[str, list[int] | None]]
    if name not in HUB_SETS or Path(name).is_file():
        set_name, prompts = Path(name).stem, _read_file(Path(name), encode)
    else:
        set_name, prompts = name, _read_hub(name, HUB_SETS[name], encode)
    ids: list[str] = []
    taken: list[list[int]] = []
    num_skipped = 0
    for prompt_id, token_ids in prompts:
        if token_ids is None or len(token_ids) > max_length:
            num_skipped += 1
            continue
        ids.append(prompt_id)
        taken.append(token_ids)
        if len(taken) == limit:
            break
    if not taken:
        raise ValueError(
            f"the set {set_name} has no prompt of at most {max_length} tokens, which is what the model's context "
            "leaves; give others, or a smaller --max-new-tokens"
        )
    return PromptSet(name=set_name, ids=ids, token_ids=taken, num_skipped=num_skipped)


def _read_file(path: Path, encode: Encode) -> Iterator[tuple[str, list[int] | None]]:
    if not path.is_file():
        raise ValueError(f"the prompts {str(path)!r} are no file here and no known set; known: {', '.join(HUB_SETS)}")
    # All are answered alike, whatever sampling a line asks for.
    lines, _ = read_prompt_file(
        path,
        lambda prompt_id, prompt, _: PromptLine(id=prompt_id, token_ids=encode(prompt), params=SamplingParams()),
        skip_bad=False,
        ignore_fields=True,
    )
    yield from ((str(line.id), line.token_ids) for line in lines)


def _read_hub(name: str, place: HubSet, encode: Encode) -> Iterator[tuple[str, list[int] | None]]:
    for number, row in enumerate(_hub_rows(name, place)):
        prompt = place.to_prompt(row)
        if prompt is None:
            continue
        try:
            yield f"{name}-{number}", encode(prompt)
        except ValueError:  # longer than the context
            yield f"{name}-{number}", None


def _hub_rows(name: str, place: HubSet) -> Iterator[Mapping[str, Any]]:
    """The rows, streamed: only what is read is downloaded."""
    # Takes seconds to import, and files do without it.
    import datasets

    try:
        # Fails at once and clearly where `datasets` would try again and again without a network.
        snapshot_download(place.repo, repo_type="dataset", revision=place.revision, allow_patterns=["README.md"])
        rows = datasets.load_dataset(
            place.repo,
            place.config,
            split=place.split,
            revision=place.revision,
            data_files=place.data_files,
            streaming=True,
        )
        yield from itertools.islice(rows, 10_000)
    except Exception as error:
        # The library and those under it raise of every kind, and whichever it is, the set cannot be had.
        is_offline = isinstance(error, LocalEntryNotFoundError | ConnectionError)
        reason = "which cannot be reached" if is_offline else " ".join(str(error).split())[:300]
        raise ValueError(
            f"the set {name} cannot be read from {place.repo} on the hub ({reason}); "
            "connect, or give a file of it with --prompts FILE"
        ) from error
