"""A stand-in for torch's paged attention kernel, by its documentation: operations of fixed shapes on the device."""

import torch


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table
):
    """`torch.nn.attention.varlen.varlen_attn`; NaN in rows that no sequence has, and past its keys nothing is read."""
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert cu_seq_k is None
    assert enable_gqa == (query.shape[1] != key.shape[2])
    num_seqs, num_places = len(block_table), block_table.shape[1] * key.shape[1]
    assert len(cu_seq_q) == num_seqs + 1
    assert len(seqused_k) == num_seqs
    assert max_k == num_places
    # One query a sequence is promised: the kernel then takes row b for sequence b's, without a look at `cu_seq_q`.
    assert max_q > 1 or len(query) == num_seqs
    rows = torch.arange(len(query))
    owners = rows if max_q == 1 else (cu_seq_q[1:, None] <= rows).sum(0).clamp(max=num_seqs - 1)
    positions = seqused_k[owners] - (1 if max_q == 1 else cu_seq_q[owners + 1] - rows)
    places = torch.arange(num_places)
    left, right = window_size
    assert right == 0
    seen = places <= positions[:, None]
    if left >= 0:
        seen &= places >= positions[:, None] - left
    kv_heads = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[2])
    keys, values = (pool[block_table.long()].flatten(1, 2)[owners][:, :, kv_heads] for pool in (key, value))
    scores = torch.einsum("qhd,qkhd->hqk", query, keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    output = torch.einsum("hqk,qkhd->qhd", weights, values.masked_fill(~seen[..., None, None], 0))
    is_nobodys = (positions < 0) | (rows >= cu_seq_q[-1])
    return output.masked_fill(is_nobodys[:, None, None], torch.nan)
