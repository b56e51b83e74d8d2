"""The data stage: finds out what the data is, and makes prompts for the base or sequences to train on of it."""

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoints import write_atomically
from ..infer import Engine
from ..recipes import DataRecipe
from .dataset import Source, find_source, mix
from .formats import Example, Format, UnusableRowError, find_format, read_example
from .prompt_rows import collect_prompts
from .prompts import Prompt, read_prompts
from .responses import Response
from .sequences import Progress, SequenceMaker, extend_sequences, read_record

NUM_LOOKED_AT = 100
"""First rows that the format is found from."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a recipe, and how it is used."""

    recipe: DataRecipe
    """As the user gave it."""
    source: Source
    """Where its rows are."""
    format: Format
    """How they are read."""
    has_responses: bool
    """Whether they hold something to train on as it stands."""

    @property
    def is_trained_on(self) -> bool:
        """Whether its own responses are trained on; otherwise the base makes them."""
        return self.has_responses and not self.recipe.regenerate

    @property
    def prompts_file(self) -> Path | None:
        """The file, where it is a JSONL of nothing but prompts."""
        if self.has_responses or self.format.columns != ("prompt",) or self.format.name != "prompt/completion":
            return None
        path = Path(self.recipe.prompts).expanduser()
        path = path if path.exists() else self.recipe.prompts_path()
        return path if path.is_file() and path.suffix in (".jsonl", ".ndjson") else None

    def describe(self) -> str:
        """One line: what was found, and what is done with it."""
        use = "its responses are trained on" if self.is_trained_on else "the base makes the responses"
        name = self.format.name if self.has_responses or self.format.name != "prompt/completion" else "prompts"
        return f"{self.recipe.prompts}: {name} (columns {', '.join(self.format.columns)}); {use}"


def open_data(recipe: DataRecipe, folder: Path) -> Data:
    """The recipe's data; ValueError where it cannot be found or read, or is of no known format.

    What `folder` notes of the same data is believed, so that a run whose data is read needs no network.
    """
    try:
        fallback = recipe.prompts_path()
    except ValueError:
        fallback = None
    source = find_source(recipe.prompts, fallback)
    record = read_record(folder)
    if record.get("source") == source.name:
        found = Format(name=record["format"], columns=tuple(record["columns"]))
        data = Data(recipe=recipe, source=source, format=found, has_responses=record["has_responses"])
    else:
        head = [row for _, row in islice(source.rows(), NUM_LOOKED_AT)]
        if not head:
            raise ValueError(f"the data {recipe.prompts!r} is empty: it has no rows; give other data")
        try:
            found = find_format(head)
        except ValueError as error:
            raise ValueError(f"the data {recipe.prompts!r} {error}") from None
        has_responses = any(example.has_response for example in _examples(head, found))
        data = Data(recipe=recipe, source=source, format=found, has_responses=has_responses)
    if recipe.regenerate and found.name == "plain text":
        raise ValueError(
            f"the data {recipe.prompts!r} is plain text, which asks for no response to regenerate; train on it as it "
            "is, without --regenerate"
        )
    return data


def own_settings(data: Data, tokenizer: Any, *, max_length: int, seed: int) -> dict[str, Any]:
    """What must be the same for sequences to be added to."""
    vocabulary = json.dumps([tokenizer.chat_template, sorted(tokenizer.get_vocab().items())])
    return {
        "source": data.source.name,
        "regenerate": False,
        "max_length": max_length,
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        "seed": seed,
    }


def read_sequences(
    folder: Path,
    data: Data,
    maker: SequenceMaker,
    settings: dict[str, Any],  # from `own_settings`
    *,
    num_tokens: int,
) -> tuple[list[Response], Progress]:
    """`extend_sequences` by the rows of `data`, mixed by the seed; ValueError names the data."""
    try:
        return extend_sequences(
            folder,
            mix(data.source.rows(), settings["seed"]),
            lambda row: maker.make(read_example(row[1], data.format)),
            settings | _describe(data),
            num_tokens=num_tokens,
        )
    except ValueError as error:
        raise ValueError(f"the data {data.recipe.prompts!r}: {error}") from error


def sample_sequences(data: Data, maker: SequenceMaker, num_rows: int) -> tuple[list[Response], bool]:
    """The sequences of the first rows, for a look ahead, and whether these are all; ValueError where there is none."""
    sequences: list[Response] = []
    reason = ""
    is_whole = True
    for number, (_, row) in enumerate(islice(data.source.rows(), num_rows + 1)):
        if number == num_rows:
            is_whole = False
            break
        try:
            sequences += maker.make(read_example(row, data.format))[0]
        except UnusableRowError as error:
            reason = str(error)
    if not sequences:
        raise ValueError(f"the data {data.recipe.prompts!r}: none of the first rows can be trained on: {reason}")
    return sequences, is_whole


def check_template(data: Data, tokenizer: Any) -> None:
    """Raise ValueError where the data are conversations and the model has no chat template."""
    if tokenizer.chat_template is None and data.format.name in ("messages", "ShareGPT"):
        raise ValueError(
            f"the data {data.recipe.prompts!r} holds conversations ({data.format.name}), and this model has no chat "
            "template to read them with; give plain text, prompt/completion or Alpaca data, or put a "
            "chat_template.jinja into the model's folder"
        )


def load_prompts(folder: Path, data: Data, engine: Engine, *, write: bool) -> list[Prompt]:
    """The prompts that the base answers; those of a data set are kept in `folder/prompts.jsonl`.

    Without `write` nothing is kept.
    """
    if data.prompts_file is not None:
        return read_prompts(data.prompts_file)
    path = folder / "prompts.jsonl"
    if path.exists() and read_record(folder).get("source") == data.source.name:
        return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]
    recipe = data.recipe
    try:
        prompts, dropped = collect_prompts(
            data.source.rows(), data.format, engine, max_prompts=recipe.max_prompts, max_length=recipe.max_length
        )
    except ValueError as error:
        raise ValueError(f"the data {recipe.prompts!r}: {error}") from error
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if not prompts:
        raise ValueError(f"the data {recipe.prompts!r} has no row that can be asked: {reasons}; give other data")
    print(f"data: {len(prompts)} prompts; dropped: {reasons or 'none'}", file=sys.stderr)
    if write:
        write_atomically(path, "".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts))
        record = prompt_settings(data) | _describe(data)
        write_atomically(folder / "data.json", json.dumps(record, indent=2) + "\n")
    return prompts


def prompt_settings(data: Data) -> dict[str, Any]:
    """What must be the same for a folder's prompts to stand."""
    if data.prompts_file is not None:
        return {"regenerate": True}
    recipe = data.recipe
    return {
        "source": data.source.name,
        "regenerate": True,
        "max_prompts": recipe.max_prompts,
        "max_length": recipe.max_length,
    }


def _examples(rows: Iterable[dict[str, Any]], found: Format) -> Iterable[Example]:
    for row in rows:
        try:
            yield read_example(row, found)
        except UnusableRowError:
            continue


def _describe(data: Data) -> dict[str, Any]:
    return {"format": data.format.name, "columns": data.format.columns, "has_responses": data.has_responses}
