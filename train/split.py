"""The split of cached sequences into what is trained on and what is measured on; the order of training."""

import sys
from collections.abc import Sequence

import torch
from tqdm import tqdm

from .cache import num_loss_rows
from .prompts import is_held_out
from .responses import Response


def split_sequences(
    sequences: Sequence[Response],
    held_out_fraction: float,
    num_tokens: int | None = None,  # response tokens to train on, of the first sequences; None takes all
) -> tuple[list[int], list[int]]:
    """Indices of the sequences to train on, and of the held-out ones (never cut); no prompt is in both.

    Raises ValueError where one of them is empty.
    """
    training, held_out = [], []
    num_read = 0
    for index, sequence in enumerate(sequences):
        if is_held_out(sequence.prompt_id, held_out_fraction):
            held_out.append(index)
        elif num_tokens is None or num_read < num_tokens:
            training.append(index)
            num_read += sequence.num_answer_tokens
    if not training or not held_out:
        raise ValueError(
            f"of {len(sequences)} responses {len(held_out)} are held out (held_out_fraction "
            f"{held_out_fraction}), so nothing is left to {'measure' if training else 'train'} on; "
            "ask for more response tokens or give another fraction"
        )
    return training, held_out


def plan_batches(
    num_responses: Sequence[int],  # response tokens of each sequence
    batch_tokens: int,
    num_epochs: int,
    seed: int,
) -> list[list[int]]:
    """What each step reads, as places in `num_responses`: shuffled every epoch, at least `batch_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[int]] = []
    batch: list[int] = []
    num_tokens = 0
    for _ in range(num_epochs):
        for place in torch.randperm(len(num_responses), generator=generator).tolist():
            batch.append(place)
            num_tokens += num_responses[place]
            if num_tokens >= batch_tokens:
                batches.append(batch)
                batch, num_tokens = [], 0
    return [*batches, batch] if batch else batches


def drop_unmeasured(batches: Sequence[list[int]], sequences: Sequence[Response]) -> list[list[int]]:
    """The batches that hold a token to learn from; how many do not is said, and ValueError where none does."""
    kept = [batch for batch in batches if any(num_loss_rows(sequences[index]) for index in batch)]
    if not kept:
        raise ValueError(
            "no training response has a token to learn from: its first one is never drafted, so it needs a second; "
            "give prompts with longer responses"
        )
    if len(kept) < len(batches):
        num_dropped = len(batches) - len(kept)
        tqdm.write(f"{num_dropped} of {len(batches)} batches have no token to learn from: left out", file=sys.stderr)
    return kept
