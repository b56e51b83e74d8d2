"""Online states: the frozen base reads each batch when it is wanted, in place of a cache on disk."""

from collections.abc import Sequence

import torch

from ..heads import Backbone
from .base_states import base_states
from .cache import (
    FINAL,
    LOG_NORMALISER,
    TOP_TOKEN,
    Batch,
    layer_column,
    pack_loss_rows,
    pack_positions,
    pack_token_ids,
    wanted_columns,
)
from .responses import Response


class OnlineStates:
    """The same batches as those of a `StateCache` of these sequences, up to the order of summation."""

    def __init__(self, sequences: Sequence[Response]) -> None:
        self.sequences = list(sequences)

    def read(self, indices: Sequence[int], exit_layers: Sequence[int], backbone: Backbone) -> Batch:
        """The sequences at `indices`, run through the base; nothing of it has a gradient."""
        sequences = [self.sequences[index] for index in indices]
        lengths = [sequence.length for sequence in sequences]
        num_prompts = [len(sequence.prompt_token_ids) for sequence in sequences]
        device = backbone.device
        positions = pack_positions(lengths).to(device)
        columns = dict(base_states(backbone, sequences, set(wanted_columns(exit_layers))))
        hidden = {layer: columns[layer_column(layer)].unsqueeze(0) for layer in exit_layers if layer > 0}
        if 0 in exit_layers:
            with torch.no_grad():
                hidden[0] = backbone.embed(pack_token_ids(sequences).to(device), positions)
        return Batch(
            lengths=lengths,
            num_prompts=num_prompts,
            kinds=[sequence.kind for sequence in sequences],
            positions=positions,
            hidden=hidden,
            final=columns[FINAL],
            log_normaliser=columns[LOG_NORMALISER],
            top_token=columns[TOP_TOKEN].long(),
            loss_rows=pack_loss_rows(lengths, num_prompts).to(device),
        )
