"""Online states: the frozen base reads each batch when it is wanted, in place of a cache on disk."""

from collections.abc import Sequence

from ..heads import Backbone
from ..recipes import Recipe
from .base_states import base_states
from .cache import Batch, make_batch, wanted_columns
from .responses import Response


class OnlineStates:
    """The same batches as those of a `StateCache` of these sequences, up to the order of summation."""

    def __init__(self, sequences: Sequence[Response]) -> None:
        self.sequences = list(sequences)

    def read(self, indices: Sequence[int], exit_layers: Sequence[int], backbone: Backbone) -> Batch:
        """The sequences at `indices`, run through the base; nothing of it has a gradient."""
        sequences = [self.sequences[index] for index in indices]
        columns = dict(base_states(backbone, sequences, set(wanted_columns(exit_layers))))
        return make_batch(sequences, columns, exit_layers, backbone)


def check_states(recipe: Recipe, cache_layers: Sequence[int]) -> None:
    """Raise ValueError where further layers are to be cached and nothing is."""
    if recipe.data.states == "online" and cache_layers:
        raise ValueError(
            f"exit layers {','.join(map(str, cache_layers))} are to be cached, but online states are kept nowhere; "
            "leave out --cache-layers or --online"
        )
