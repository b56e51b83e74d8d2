"""Base states: what the frozen base computes over whole sequences, read teacher-forced.

T rows of whole sequences side by side; D hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..heads import Backbone, DenseAttention
from .cache import (
    FINAL,
    LOG_NORMALISER,
    TOP_TOKEN,
    cached_layers,
    layer_column,
    pack_loss_rows,
    pack_positions,
    pack_token_ids,
)
from .responses import Response

ROWS_PER_CHUNK = 256


@torch.no_grad()  # not inference mode: heads differentiate through what they make of these states
def base_states(
    backbone: Backbone,
    sequences: Sequence[Response],
    columns: set[str],  # names as in the cache
) -> Iterator[tuple[str, Tensor]]:  # states [T, D] in the base's dtype; one value a row is [T]
    """The columns, in one pass that goes no deeper than it must; each is yielded as soon as it is there."""
    lengths = [sequence.length for sequence in sequences]
    device = backbone.device
    positions = pack_positions(lengths).to(device)
    attend = DenseAttention(lengths)
    hidden = backbone.embed(pack_token_ids(sequences).to(device), positions)
    depth = 0
    for layer in sorted(cached_layers(list(columns))):
        hidden = backbone.run_layers(hidden, depth, layer, positions, attend)
        depth = layer
        yield layer_column(layer), hidden[0]
    if columns.isdisjoint({FINAL, LOG_NORMALISER, TOP_TOKEN}):
        return
    hidden = backbone.run_layers(hidden, depth, backbone.num_layers, positions, attend)
    final = backbone.final_norm(hidden)[0]
    yield FINAL, final
    rows = pack_loss_rows(lengths, [sequence.spans for sequence in sequences]).to(device)
    log_normaliser = torch.zeros(len(final), device=device)
    top_token = torch.zeros(len(final), dtype=torch.int32, device=device)
    for start in range(0, len(rows), ROWS_PER_CHUNK):  # `split` makes one empty chunk of no rows
        chunk = rows[start : start + ROWS_PER_CHUNK]
        # float32 before the sum: a normaliser in bfloat16 would be off by some percent.
        logits = backbone.logits(final[chunk]).float()
        log_normaliser[chunk] = logits.logsumexp(-1)
        top_token[chunk] = logits.argmax(-1).int()
    yield LOG_NORMALISER, log_normaliser
    yield TOP_TOKEN, top_token
