"""Sequences: the rows of a data set as the token sequences that heads are trained on, kept in a responses file."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..checkpoints import write_atomically
from .chat_spans import Tokens, mask_spans, tokenize_chat, tokenize_spans
from .formats import Example, UnusableRowError
from .pieces import cut_text, fit_answers
from .responses import Response, read_responses, write_responses

SAVE_INTERVAL = 1000
"""Rows between two notes of how far the data has been read."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a data set has been read, and what came of it."""

    num_rows: int = 0
    """Rows read."""
    num_sequences: int = 0
    """Sequences made of them."""
    num_tokens: int = 0
    """Their tokens."""
    num_answer_tokens: int = 0
    """Those of them that are trained on."""
    num_cut: int = 0
    """Rows longer than `max_length`: a prompt that lost its beginning, or pieces."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that gave no sequence, by reason."""
    is_whole: bool = False
    """Whether the last row has been read."""

    def after(self, sequences: Sequence[Response], is_cut: bool, reason: str | None) -> "Progress":
        """One row later."""
        dropped = self.dropped if reason is None else dict(Counter(self.dropped) + Counter([reason]))
        return replace(
            self,
            num_rows=self.num_rows + 1,
            num_sequences=self.num_sequences + len(sequences),
            num_tokens=self.num_tokens + sum(sequence.length for sequence in sequences),
            num_answer_tokens=self.num_answer_tokens + sum(sequence.num_answer_tokens for sequence in sequences),
            num_cut=self.num_cut + is_cut,
            dropped=dropped,
        )


class SequenceMaker:
    """Makes sequences of at most `max_length` tokens out of examples."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_length: int) -> None:
        self._tokenizer, self._vocab_size, self._max_length = tokenizer, vocab_size, max_length

    def make(self, example: Example) -> tuple[list[Response], bool]:
        """The sequences, at least one, and whether the row was too long for one; raises UnusableRowError.

        An answer is never lost: what is too long loses the beginning of its prompt, and then falls into pieces.
        """
        is_text = example.turns is None and example.mask is None
        found = self._tokenize(example)
        pieces: list[Tokens] = []
        for tokens in found:
            num_lead = int(tokens.token_ids[:1] == [getattr(self._tokenizer, "bos_token_id", None)])
            cut = cut_text if is_text else fit_answers
            pieces += cut(tokens, self._max_length, num_lead)
        pieces = [piece for piece in pieces if any(stop - start > 1 for start, stop in piece.spans)]
        if not pieces:
            raise UnusableRowError("rows fully masked: no answer of two tokens or more")
        is_cut = any(len(tokens.token_ids) > self._max_length for tokens in found)
        return [_as_response(example, number, piece) for number, piece in enumerate(pieces)], is_cut

    def _tokenize(self, example: Example) -> list[Tokens]:
        if example.token_ids is not None:
            return [self._read_tokens(example)]
        if example.text is not None:
            token_ids = self._end(list(self._tokenizer(example.text, verbose=False)["input_ids"]))
            return [Tokens(token_ids=token_ids, spans=[(min(1, len(token_ids)), len(token_ids))])]
        assert example.turns is not None
        if self._tokenizer.chat_template is not None:
            return tokenize_chat(self._tokenizer, example.turns, example.tools)
        *before, answer = (turn["content"] for turn in example.turns)
        if example.turns[-1]["role"] != "assistant" or example.glue is None:
            raise UnusableRowError("conversations without an answer")
        question = "\n\n".join(before) + example.glue
        text = question + answer
        tokens = tokenize_spans(self._tokenizer, text, [(len(question), len(text))], add_special_tokens=True)
        start, stop = tokens.spans[0]
        token_ids = self._end(tokens.token_ids[:stop])
        # Without a template and a token before the text, an empty question leaves nothing to read before the answer.
        return [Tokens(token_ids=token_ids, spans=[(max(1, start), len(token_ids))])]

    def _read_tokens(self, example: Example) -> Tokens:
        assert example.token_ids is not None
        if not all(0 <= token_id < self._vocab_size for token_id in example.token_ids):
            raise ValueError(
                f"the row {example.id!r} has a token id outside 0 to {self._vocab_size - 1}: it was made for another "
                "model; tokenise the data with this model's tokenizer, or give it as text"
            )
        mask = example.mask or [True] * len(example.token_ids)
        # The first token has nothing before it, so nobody drafts it.
        return Tokens(token_ids=example.token_ids, spans=mask_spans([False, *mask[1:]]))

    def _end(self, token_ids: list[int]) -> list[int]:
        """With the end-of-sequence token, which a model says where it has nothing to add."""
        end = self._tokenizer.eos_token_id
        return token_ids if end is None or token_ids[-1:] == [end] else [*token_ids, end]


def extend_sequences(
    folder: Path,
    rows: Iterable[Any],
    make: Callable[[Any], tuple[list[Response], bool]],  # raises UnusableRowError
    record: Mapping[str, Any],  # what the data was read with; goes into data.json
    *,
    num_tokens: int,
) -> tuple[list[Response], Progress]:
    """Read rows until the sequences in `folder/responses.jsonl` have `num_tokens` answer tokens.

    Goes on behind the rows that `folder/data.json` counts, and reads none where it has enough. An interruption loses
    nothing. Raises ValueError, and leaves nothing, where no row gives a sequence.
    """
    path, record_path = folder / "responses.jsonl", folder / "data.json"
    progress = Progress(**read_record(folder).get("progress", {}))
    sequences = list(islice(read_responses(path), progress.num_sequences))
    if len(sequences) < progress.num_sequences:
        progress, sequences = Progress(), []
    if progress.num_answer_tokens < num_tokens and not progress.is_whole:
        begun = progress
        # What an interruption wrote after the last note would come twice.
        write_responses(path, sequences)
        try:
            with path.open("a", encoding="utf-8") as file:
                progress = _read_on(
                    rows, make, file, sequences, progress, num_tokens, lambda now: _note(record_path, record, now)
                )
        except ValueError:
            if begun.num_rows == 0:
                _forget(folder)
            raise
    if not sequences:
        _forget(folder)
        reasons = "; ".join(f"{count} {reason}" for reason, count in progress.dropped.items())
        raise ValueError(f"no row can be trained on: {reasons or 'there is none'}; give other data")
    return _beginning(sequences, num_tokens), progress


def read_made(folder: Path, num_tokens: int) -> tuple[list[Response], bool]:
    """The sequences that `folder` has, up to `num_tokens` answer tokens, and whether the data has no more."""
    progress = Progress(**read_record(folder).get("progress", {}))
    made = list(islice(read_responses(folder / "responses.jsonl"), progress.num_sequences))
    return _beginning(made, num_tokens), progress.is_whole


def read_record(folder: Path) -> dict[str, Any]:
    """What `folder/data.json` notes; empty where there is none, or none that can be read."""
    try:
        record = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def describe_progress(progress: Progress, max_length: int) -> str:
    """One line of counts."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in progress.dropped.items())
    return (
        f"{progress.num_rows} rows read, {progress.num_sequences} sequences of {progress.num_tokens} tokens, "
        f"{progress.num_answer_tokens} of them trained on; {progress.num_cut} rows were longer than {max_length} "
        f"tokens; dropped: {dropped or 'none'}"
    )


def _read_on(
    rows: Iterable[Any],
    make: Callable[[Any], tuple[list[Response], bool]],
    file: Any,
    sequences: list[Response],
    progress: Progress,
    num_tokens: int,
    note: Callable[[Progress], None],
) -> Progress:
    def save() -> None:
        file.flush()
        os.fsync(file.fileno())
        note(progress)

    with tqdm(total=num_tokens, initial=progress.num_answer_tokens, unit="tok", desc="data", delay=2) as bar:
        try:
            for row in islice(rows, progress.num_rows, None):
                made: list[Response] = []
                is_cut, reason = False, None
                try:
                    made, is_cut = make(row)
                except UnusableRowError as error:
                    reason = str(error)
                file.write("".join(sequence.to_json() + "\n" for sequence in made))
                # One assignment, so that Ctrl-C finds all of a row counted or nothing of it.
                sequences += made
                progress = progress.after(made, is_cut, reason)
                bar.update(progress.num_answer_tokens - bar.n)
                if progress.num_rows % SAVE_INTERVAL == 0:
                    save()
                if progress.num_answer_tokens >= num_tokens:
                    break
            else:
                progress = replace(progress, is_whole=True)
        finally:
            save()
    return progress


def _note(path: Path, record: Mapping[str, Any], progress: Progress) -> None:
    write_atomically(path, json.dumps({**record, "progress": asdict(progress)}, indent=2) + "\n")


def _forget(folder: Path) -> None:
    for name in ("data.json", "responses.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _beginning(sequences: Sequence[Response], num_tokens: int) -> list[Response]:
    num_read = 0
    for place, sequence in enumerate(sequences):
        if num_read >= num_tokens:
            return list(sequences[:place])
        num_read += sequence.num_answer_tokens
    return list(sequences)


def _as_response(example: Example, number: int, tokens: Tokens) -> Response:
    first, last = tokens.spans[0][0], tokens.spans[-1][1]
    answers = [[start - first, stop - first] for start, stop in tokens.spans]
    return Response(
        prompt_id=example.id,
        kind=example.kind,
        sample=number,
        prompt_token_ids=tokens.token_ids[:first],
        token_ids=tokens.token_ids[first:last],
        answers=answers if len(answers) > 1 else None,
    )
