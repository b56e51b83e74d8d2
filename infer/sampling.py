"""From logits to the distribution that a request asked for, and from that to tokens. Tensors in, tensors out.

R rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor


def to_probs(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R] float32, > 0
    top_k: Tensor,  # [R] int64, 0 keeps all
    top_p: Tensor,  # [R] float32, 1 keeps all
    min_p: Tensor,  # [R] float32, 0 keeps all
) -> Tensor:  # [R, V] float32, each row sums to 1
    """Apply temperature, top-k, top-p, min-p, as transformers does; of equal logits the lowest id goes first."""
    logits = logits.float()
    # Shifted first: a tiny temperature then sends all but the maximum to -inf instead of overflowing.
    divisor = temperature.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / divisor
    if not (top_k.any() or (top_p < 1).any()):
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


def _keep_likely(probs: Tensor, min_p: Tensor) -> Tensor:
    if not (min_p > 0).any():
        return probs
    probs = probs.masked_fill(probs < min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def to_probs_one_by_one(*arguments: Tensor) -> Tensor:  # as of `to_probs`
    """`to_probs` of each row by itself: bit for bit the same whatever rows, with whatever parameters, stand beside it.

    Otherwise the parameters of one row decide how all are computed, and threads share the sum of a lone row.
    """
    rows = zip(*(argument.split(1) for argument in arguments), strict=True)
    return torch.cat([to_probs(*row) for row in rows])


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
    exponential = np.maximum(generator.standard_exponential(vocab_size), np.finfo(np.float64).tiny)
    return torch.from_numpy(-np.log(exponential)).float()
