"""From logits to the distribution that a request asked for, and from that to tokens. Tensors in, tensors out.

R rows, V vocabulary. Nothing here waits for the device: what a request asks for is known before its logits are.
"""

from collections.abc import Sequence as Items
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .config import SamplingParams
from .transfer import to_device


class Settings(NamedTuple):
    """What `to_probs` is told, row by row; None keeps all in every row."""

    temperature: Tensor  # [R] float32, > 0; means nothing in greedy rows
    top_k: Tensor | None  # [R] int64
    top_p: Tensor | None  # [R] float32
    min_p: Tensor | None  # [R] float32


def build_settings(params: Items[SamplingParams], device: torch.device) -> Settings:
    """Those of rows with these parameters."""
    temperature = [1.0 if each.is_greedy else each.temperature for each in params]
    filtered = any(each.top_k for each in params) or any(each.top_p < 1 for each in params)
    has_min_p = any(each.min_p > 0 for each in params)
    return Settings(
        to_device(temperature, device, torch.float32),
        to_device([each.top_k for each in params], device) if filtered else None,
        to_device([each.top_p for each in params], device, torch.float32) if filtered else None,
        to_device([each.min_p for each in params], device, torch.float32) if has_min_p else None,
    )


def to_probs(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R] float32, > 0
    top_k: Tensor | None,  # [R] int64, 0 keeps all
    top_p: Tensor | None,  # [R] float32, 1 keeps all; None where top_k is
    min_p: Tensor | None,  # [R] float32, 0 keeps all
) -> Tensor:  # [R, V] float32, each row sums to 1
    """Apply temperature, top-k, top-p, min-p, as transformers does; of equal logits the lowest id goes first.

    None keeps all, by fewer operations.
    """
    logits = logits.float()
    # Shifted first: a tiny temperature then sends all but the maximum to -inf instead of overflowing.
    divisor = temperature.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / divisor
    if top_k is None or top_p is None:
        return _keep_likely(logits.softmax(-1), min_p)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).unsqueeze(-1)
    ordered = ordered.masked_fill(rank >= k, -torch.inf)
    probs = ordered.softmax(-1)
    # A token stays while those before it have not reached top_p; the first one always stays.
    reached = (probs.cumsum(-1) - probs >= top_p.unsqueeze(-1)) & (top_p.unsqueeze(-1) < 1) & (rank > 0)
    probs = probs.masked_fill(reached, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    return _keep_likely(torch.zeros_like(probs).scatter_(-1, order, probs), min_p)


def _keep_likely(probs: Tensor, min_p: Tensor | None) -> Tensor:
    if min_p is None:
        return probs
    probs = probs.masked_fill(probs < min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def draw(
    probs: Tensor,  # [R, V], need not sum to 1
    uniforms: Tensor,  # [R] in [0, 1)
) -> Tensor:  # [R] int64
    """One token a row by the inverse of the cumulative distribution; a token of probability 0 is never drawn."""
    cumulative = probs.double().cumsum(-1)
    target = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def gumbel_noise(seed: int, index: int, position: int, vocab_size: int) -> Tensor:  # [V] float32
    """The noise of one position of the text `index` of one seeded request, the same at every level.

    `argmax(log probs + noise)` is a draw from `probs`; levels that share the noise tend to the same token
    (drafter-invariant speculative decoding, Daliri et al. 2024).
    """
    # Philox is keyed by design: neighbouring seeds and positions are unrelated.
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    # The counter's highest word, which no draw ever reaches, tells the texts of one request apart.
    generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], dtype=np.uint64)))
    # In float32 one draw in some millions would be 0, and its token forced whatever its probability.
    noise = generator.standard_exponential(vocab_size)
    # In place: every further array of this size would be new memory from the operating system.
    np.maximum(noise, np.finfo(np.float64).tiny, out=noise)
    np.negative(np.log(noise, out=noise), out=noise)
    # By NumPy: this runs in threads, and torch would start a team of its own in each.
    return torch.from_numpy(noise.astype(np.float32))


def gumbel_noises(
    places: Items[tuple[int, int, int]],  # seed, index and position
    vocab_size: int,
) -> list[Tensor]:  # [V] float32 each
    """`gumbel_noise` of several places, by as many threads as torch has: a batch needs a row for every token."""
    noises: dict[int, Tensor] = {}

    def draw_every(first: int, step: int) -> None:
        for number in range(first, len(places), step):
            seed, index, position = places[number]
            noises[number] = gumbel_noise(seed, index, position, vocab_size)

    # No pool: after a fork it would have no threads, and at the end of the main thread it takes no more work.
    num_threads = max(1, min(torch.get_num_threads(), len(places)))
    threads = [Thread(target=draw_every, args=(first, num_threads)) for first in range(1, num_threads)]
    for thread in threads:
        thread.start()
    draw_every(0, num_threads)
    for thread in threads:
        thread.join()
    return [noises[number] for number in range(len(places))]
