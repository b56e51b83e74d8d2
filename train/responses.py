"""Responses: what the base model itself answers to the prompts; heads are trained on these alone."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..checkpoints import write_atomically
from ..infer import Completion, Engine, SamplingParams
from .prompts import Prompt, encode_prompt, is_held_out


@dataclass(frozen=True, kw_only=True)
class Response:
    """One answer of the base model, or what a data set holds: a prompt and one or more answers."""

    prompt_id: str
    """`Prompt.id`."""
    kind: str
    """`Prompt.kind`."""
    sample: int
    """0 is the greedy answer; every other number is a sampled one with a seed of its own. In a data set: the piece."""
    prompt_token_ids: list[int]
    """The rendered prompt, up to where the answer starts."""
    token_ids: list[int]
    """The answer, its end-of-sequence token included; where there are more answers, all up to the last one's end."""
    answers: list[list[int]] | None = None
    """`[start, stop)` of each answer in `token_ids`, where questions stand between them; None is one, all of it."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of all that follows."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """`[start, stop)` of each answer in the rows of the sequence, rising."""
        before = len(self.prompt_token_ids)
        return [(before + start, before + stop) for start, stop in self.answers or [[0, len(self.token_ids)]]]

    @property
    def answer_ids(self) -> list[int]:
        """The tokens of all answers."""
        if self.answers is None:
            return self.token_ids
        return [token_id for start, stop in self.answers for token_id in self.token_ids[start:stop]]

    @property
    def read_ids(self) -> list[int]:
        """The other tokens: what is only read."""
        read, place = list(self.prompt_token_ids), 0
        for start, stop in self.answers or [[0, len(self.token_ids)]]:
            read += self.token_ids[place:start]
            place = stop
        return read

    @property
    def num_answer_tokens(self) -> int:
        """How many `answer_ids` there are."""
        return sum(stop - start for start, stop in self.spans)

    def to_json(self) -> str:
        """The line of a responses file."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def response_order(
    prompts: Sequence[Prompt],
    *,
    greedy: bool,  # whether sample 0 is asked for
    num_sampled: int,
    held_out_fraction: float,
    seed: int,
) -> list[tuple[Prompt, int]]:
    """Every (prompt, sample) once; any beginning of it has prompts, kinds, samples and the split evenly."""
    shuffled = sorted(prompts, key=lambda prompt: _item_seed(seed, prompt.id, -1))
    held_out = [prompt for prompt in shuffled if is_held_out(prompt.id, held_out_fraction)]
    training = [prompt for prompt in shuffled if not is_held_out(prompt.id, held_out_fraction)]
    spread = [(place / len(held_out), prompt) for place, prompt in enumerate(held_out)]
    spread += [(place / len(training), prompt) for place, prompt in enumerate(training)]
    shuffled = [prompt for _, prompt in sorted(spread, key=lambda item: item[0])]
    samples = range(0 if greedy else 1, num_sampled + 1)
    return [
        (prompt, samples[(lap + place) % len(samples)])
        for lap in range(len(samples))
        for place, prompt in enumerate(shuffled)
    ]


def regenerate(
    engine: Engine,
    order: Sequence[tuple[Prompt, int]],
    path: Path,
    *,
    num_tokens: int | None,  # None answers every prompt
    max_new_tokens: int,
    temperature: float,
    max_num_seqs: int,
    seed: int,
) -> list[Response]:
    """Answer the prompts in order until `num_tokens` response tokens are there, from what `path` holds on.

    Each answer is appended to `path` and flushed when it is finished, so that an interruption costs only what
    was being written. The same prompts and seed give the same responses, however often the work was
    interrupted (but for near ties, which in 16 bits can fall differently in another batch). At the end the
    file is put in order; it keeps every answer, also those beyond what was wanted. A file that has enough is
    left as it is.
    """
    is_bounded = num_tokens is not None
    num_tokens = len(order) * max_new_tokens if num_tokens is None else num_tokens
    _drop_torn_line(path)
    finished = _read_finished(path)
    keys = [(prompt.id, sample) for prompt, sample in order]
    responses = _beginning(finished, keys, num_tokens)
    if _count(responses) >= num_tokens:
        return responses
    left = [item for item, key in zip(order, keys, strict=True) if key not in finished]
    num_counted, num_finished, num_skipped = _needed(finished, keys, num_tokens, max_new_tokens)
    running: dict[int, tuple[Prompt, int]] = {}
    waiting = iter(left)
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=num_tokens, initial=num_finished, unit="tok", desc="responses") as progress,
    ):
        try:
            while True:
                num_missing = count_missing(num_counted, num_finished, len(running), num_tokens, max_new_tokens)
                num_free = min(max_num_seqs - len(running), max(0, num_missing, num_skipped))
                for prompt, sample in islice(waiting, num_free):
                    params = SamplingParams(
                        max_new_tokens=max_new_tokens,
                        temperature=temperature if sample else 0.0,
                        seed=_item_seed(seed, prompt.id, sample) if sample else None,
                    )
                    running[engine.add_request(encode_prompt(engine, prompt), params)] = (prompt, sample)
                num_skipped = max(0, num_skipped - num_free)
                if not running:
                    break
                for completion in engine.step():
                    response = _response(*running.pop(completion.request_id), completion)
                    file.write(response.to_json() + "\n")
                    file.flush()
                    finished[response.prompt_id, response.sample] = response
                    num_counted += 1
                    num_finished += len(response.token_ids)
                    progress.update(len(response.token_ids))
        finally:
            for request_id in running:
                engine.abort(request_id)
    write_responses(path, [finished[key] for key in keys if key in finished])
    if is_bounded and num_finished < num_tokens:
        text = f"all prompts are answered: {num_finished} response tokens, {num_tokens} were wanted"
        tqdm.write(text, file=sys.stderr)
    return _beginning(finished, keys, num_tokens)


def merge_responses(path: Path, order: Sequence[tuple[Prompt, int]]) -> None:
    """Bring what ranks have answered, each into its `part_path`, into `path`, in order; a kill loses nothing."""
    parts = sorted(path.parent.glob(f"{path.stem}.part-*{path.suffix}"))
    if not parts:
        return
    finished = _read_finished(path)
    for part in parts:
        finished |= _read_finished(part)
    keys = [(prompt.id, sample) for prompt, sample in order]
    write_responses(path, [finished[key] for key in keys if key in finished])
    for part in parts:
        part.unlink()


def part_path(path: Path, rank: int) -> Path:
    """Where a rank puts its answers until they are merged into `path`."""
    return path.with_name(f"{path.stem}.part-{rank}{path.suffix}")


def next_items(
    path: Path, order: Sequence[tuple[Prompt, int]], num_tokens: int, max_new_tokens: int
) -> list[tuple[Prompt, int]]:
    """Whom to ask next, in order, for `path` to have about `num_tokens`; none where it has them or all are answered."""
    finished = _read_finished(path)
    keys = [(prompt.id, sample) for prompt, sample in order]
    if _count(_beginning(finished, keys, num_tokens)) >= num_tokens:
        return []
    _, num_finished, num_skipped = _needed(finished, keys, num_tokens, max_new_tokens)
    mean = _mean_length(finished, max_new_tokens)
    num_more = math.ceil(max(0, num_tokens - num_finished) / mean)
    missing = [item for item, key in zip(order, keys, strict=True) if key not in finished]
    return missing[: num_skipped + num_more]


def _needed(
    finished: Mapping[tuple[str, int], Response],
    keys: Sequence[tuple[str, int]],
    num_tokens: float,
    max_new_tokens: int,
) -> tuple[int, int, int]:
    """Of the beginning of the order that should have `num_tokens`: what is finished, its tokens, and the gaps between.

    An interrupted run skips over answers, because longer ones finish later; one of other settings may have left answers
    far behind, which nobody waits for.
    """
    mean = _mean_length(finished, max_new_tokens)
    num_counted = num_finished = num_missing = num_skipped = 0
    for key in keys:
        if num_finished + num_missing * mean >= num_tokens:
            break
        if key in finished:
            num_counted += 1
            num_finished += finished[key].num_answer_tokens
            num_skipped = num_missing
        else:
            num_missing += 1
    return num_counted, num_finished, num_skipped


def _mean_length(finished: Mapping[tuple[str, int], Response], max_new_tokens: int) -> float:
    num_tokens = _count(finished.values())
    return num_tokens / len(finished) if num_tokens else max_new_tokens / 2


def count_missing(
    num_finished: int, num_finished_tokens: int, num_running: int, num_tokens: int, max_new_tokens: int
) -> int:
    """How many responses must still be begun to reach `num_tokens`, beside those that run; below 0 if too many do."""
    # What runs now will bring tokens too: without counting them, the end would be far overshot.
    expected = num_finished_tokens + num_running * max_new_tokens / 2
    mean = expected / (num_finished + num_running) if expected else max_new_tokens / 2
    return math.ceil((num_tokens - num_finished_tokens) / mean) - num_running


def read_beginning(
    path: Path,
    order: Sequence[tuple[Prompt, int]],
    num_tokens: float = math.inf,
) -> list[Response]:
    """What is finished in the order of `order`, up to a missing one or to `num_tokens`; also while `path` grows."""
    return _beginning(_read_finished(path), [(prompt.id, sample) for prompt, sample in order], num_tokens)


def _response(prompt: Prompt, sample: int, completion: Completion) -> Response:
    if completion.error is not None:
        raise ValueError(f"the base model fails on prompt {prompt.id!r}: {completion.error}")
    return Response(
        prompt_id=prompt.id,
        kind=prompt.kind,
        sample=sample,
        prompt_token_ids=list(completion.prompt_token_ids),
        token_ids=list(completion.token_ids),
    )


def _item_seed(seed: int, prompt_id: str, sample: int) -> int:
    digest = hashlib.sha256(f"{seed}/{sample}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _count(responses: Iterable[Response]) -> int:
    return sum(response.num_answer_tokens for response in responses)


def _beginning(
    finished: Mapping[tuple[str, int], Response], keys: Sequence[tuple[str, int]], num_tokens: float
) -> list[Response]:
    """The finished responses in the order of `keys`, up to a missing one or up to `num_tokens` tokens."""
    responses: list[Response] = []
    num_read = 0
    for key in keys:
        if key not in finished or num_read >= num_tokens:
            break
        responses.append(finished[key])
        num_read += finished[key].num_answer_tokens
    return responses


def _read_finished(path: Path) -> dict[tuple[str, int], Response]:
    return {(response.prompt_id, response.sample): response for response in read_responses(path)}


def read_responses(path: Path) -> Iterator[Response]:
    """Every response of a file, in its order, without a torn last line; ValueError names a bad line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # torn by an interruption: that answer is made again
            try:
                record: dict[str, Any] = json.loads(line)
                yield Response(**record)
            except (ValueError, TypeError):
                raise ValueError(f"{path} line {number} is not a response; delete the line, then run again") from None


def describe_responses(responses: Sequence[Response]) -> str:
    """Which responses these are, the first sixteen by name."""
    names = [f"{response.prompt_id}/{response.sample}" for response in responses[:16]]
    more = f" and {len(responses) - 16} more" if len(responses) > 16 else ""
    return f"{', '.join(names)}{more} (prompt/sample)"


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def write_responses(path: Path, responses: Sequence[Response]) -> None:
    """Replace `path` by these responses, at once or not at all."""
    write_atomically(path, "".join(response.to_json() + "\n" for response in responses))
