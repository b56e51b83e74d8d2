"""The draft vocabulary: the tokens that the base says most often, which is all that a head needs to score."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .responses import Response


def frequent_tokens(
    responses: Iterable[Response],
    size: int,
    vocab_size: int,
) -> Tensor:  # [size] int64, rising
    """The `size` most frequent token ids of the responses; unseen ones, lowest first, fill up."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"the draft vocabulary size is {size}; the base has {vocab_size} tokens, so 1 to {vocab_size}")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for response in responses:
        counts += torch.bincount(torch.tensor(response.answer_ids, dtype=torch.int64), minlength=vocab_size)
    # A stable sort puts equal counts, so also the unseen ids, in rising order.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
