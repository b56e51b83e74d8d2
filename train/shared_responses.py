"""Shared responses: the ranks answer the prompts side by side, and it is as if one had answered them all."""

from collections.abc import Sequence
from pathlib import Path

from ..infer import Engine
from .prompts import Prompt
from .ranks import Ranks
from .responses import Response, merge_responses, next_items, part_path, read_beginning, regenerate


def regenerate_over(
    ranks: Ranks,
    engine: Engine,
    order: Sequence[tuple[Prompt, int]],
    path: Path,
    *,
    num_tokens: int,
    max_new_tokens: int,
    temperature: float,
    max_num_seqs: int,
    seed: int,
) -> list[Response]:
    """`regenerate` over all ranks: each answers its share into a file of its own, and the main one merges them.

    A few times over, because nobody knows how long answers will be. A run of another number of ranks goes on from
    what is there.
    """

    def answer(items: Sequence[tuple[Prompt, int]], file: Path, wanted: int | None) -> list[Response]:
        return regenerate(
            engine,
            items,
            file,
            num_tokens=wanted,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            max_num_seqs=max_num_seqs,
            seed=seed,
        )

    with ranks.together():
        if ranks.is_main:
            merge_responses(path, order)
    if ranks.size == 1:
        return answer(order, path, num_tokens)
    while items := next_items(path, order, num_tokens, max_new_tokens):
        with ranks.together():
            answer(items[ranks.rank :: ranks.size], part_path(path, ranks.rank), None)
        with ranks.together():
            if ranks.is_main:
                merge_responses(path, order)
    with ranks.together():
        # Nothing is left to answer: this says so where less is there than was wanted.
        if ranks.is_main:
            answer(order, path, num_tokens)
    return read_beginning(path, order, num_tokens)
