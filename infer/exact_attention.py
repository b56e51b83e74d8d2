"""Attention whose bits do not depend on what else is computed: other queries, sequences, padding, memory, threads.

B sequences; Hkv key heads; R queries of one key head; S keys; Dh head size.

Floating-point sums depend on their order, and a kernel chooses it by the shapes, which in decoding are never the same
twice. Here every sum is a sum of integers that a float64 holds exactly, in whatever order: queries, keys, values and
weights are rounded, each row by itself and relative to its own largest element, to so many bits that no partial sum
passes 53. A masked or padded key adds 0. All that is left are element-wise operations, of which a float64's are exact
to the rounding (IEEE 754) and `exp` and `tanh` are, in torch, the same at every place of a tensor; and a maximum.
The rounding is about that of float32: 23 bits of the largest element for the usual head sizes.
"""

import torch
from torch import Tensor

MANTISSA = 53
"""Bits of an integer that a float64 holds."""
VALUE_BITS = 24
"""Of a value, as many as a float32 has."""
WEIGHT_BITS = 28
"""Of the weights, which sum up to 1: with a value's they stay below `MANTISSA`, even if all are rounded up."""
EXP_BITS = 35
"""Of the exponentials, none of which passes 1: sums of up to 2^18 keys stay below `MANTISSA`."""
MAX_SCORES = 2**22
"""Scores that exist at once, so that memory does not grow with R * S."""
SMALLEST = 2.0**-900
"""Stands in for the largest element of a row of zeros."""


def exact_attention(
    query: Tensor,  # [B, Hkv, R, Dh]
    keys: Tensor,  # [B, Hkv, S, Dh]
    values: Tensor,  # [B, Hkv, S, Dh]
    mask: Tensor | None,  # [B, 1, R, S], True where a query sees a key; None is everywhere
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:  # [B, Hkv, R, Dh]
    """`softmax(query @ keys.T * scaling) @ values`; every query must see a key."""
    num_keys, head_dim = keys.shape[-2:]
    assert num_keys <= 2 ** (MANTISSA - EXP_BITS)
    bits = (MANTISSA - (head_dim - 1).bit_length()) // 2
    key_parts, key_steps = _to_integers(keys, bits)
    value_parts, value_steps = _to_integers(values, VALUE_BITS)
    key_parts, key_steps, value_steps = (part.transpose(-1, -2) for part in (key_parts, key_steps, value_steps))
    num_rows = max(1, MAX_SCORES // (keys[..., 0].numel()))
    outputs = []
    for start in range(0, query.shape[2], num_rows):
        rows = slice(start, start + num_rows)
        seen = None if mask is None else mask[:, :, rows]
        parts, steps = _to_integers(query[:, :, rows], bits)
        scores = (parts @ key_parts) * (steps * scaling) * key_steps
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = ((scores - scores.amax(-1, keepdim=True)).exp() * 2.0**EXP_BITS).round()
        weights /= weights.sum(-1, keepdim=True)
        # On a common scale, which must be that of the seen keys: what comes behind them may not matter.
        steps = value_steps if seen is None else value_steps.masked_fill(~seen, 0)
        step = steps.amax(-1, keepdim=True)
        weights = (weights * (steps / step) * 2.0**WEIGHT_BITS).round()
        outputs.append(((weights @ value_parts) * (step * 2.0**-WEIGHT_BITS)).to(query.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _to_integers(
    rows: Tensor,  # [..., Dh]
    bits: int,
) -> tuple[Tensor, Tensor]:  # [..., Dh] float64, whole numbers up to 2^bits; [..., 1] float64, what 1 of them is worth
    rows = rows.double()
    largest = rows.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    # Its exponent alone: a power of two, by which products and quotients are exact.
    power = (largest.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    steps = power * 2.0 ** (1 - bits)
    return (rows / steps).round(), steps
