"""Guesses of a text's next tokens that a model improves side by side. Integers only.

A column is a run of tokens: column i stands i tokens further on in the text than column 0, whose first token is the
newest known one. The first tokens of all columns stand one behind the other, and behind each of them the rest of its
column, so that the window is a tree. What the model finds likeliest behind a column is its next token (one Jacobi
iteration of parallel decoding) and completes an n-gram; the column drops its first.
"""

from collections.abc import Sequence as Items

from .token_tree import TokenTree

Columns = tuple[tuple[int, ...], ...]


def first_columns(token_ids: Items[int], num_columns: int, length: int) -> Columns:
    """To begin with: the text's last tokens, as if they came again, and again where it is short."""
    num_tokens = len(token_ids)
    first = num_tokens - (num_columns + length - 1)
    return tuple(tuple(token_ids[(first + i + k) % num_tokens] for k in range(length)) for i in range(num_columns))


def add_columns(
    tree: TokenTree,
    columns: Columns,
    max_nodes: int,  # that the tree may have
    max_depth: int,  # of a node
) -> list[int]:
    """Put columns into the tree, the first ones, as many as there is room for; the last node of each."""
    ends: list[int] = []
    spine = 0
    for place, column in enumerate(columns):
        # The root stands for the first token of column 0.
        new = column if place else column[1:]
        if len(tree) + tree.num_missing(spine, new) > max_nodes or place + len(column) - 1 > max_depth:
            break
        if place:
            spine = tree.add(spine, column[:1])
        ends.append(tree.add(spine, column[1:]))
    return ends


def completed_ngrams(columns: Columns, root_id: int, next_ids: Items[int]) -> list[tuple[int, ...]]:
    """What the first columns have become with their next tokens."""
    ngrams = [(*column, next_id) for column, next_id in zip(columns, next_ids, strict=False)]
    return [(root_id, *ngram[1:]) if place == 0 else ngram for place, ngram in enumerate(ngrams)]


def next_columns(columns: Columns, next_ids: Items[int]) -> Columns:
    """The window of the next round; columns that there was no room for stay as they are."""
    moved = tuple((*column[1:], next_id) for column, next_id in zip(columns, next_ids, strict=False))
    return moved + columns[len(moved) :]
