"""Trial of a base with stand-ins: whether the backbone's walk over its parts is still the base's own forward."""

import warnings
from typing import Any

import torch
from torch import Tensor

from .attention import DenseAttention
from .backbone import Backbone

NUM_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3}
"""Of the largest logit, the difference that summing in another order may make."""
HALF_TOLERANCE = 5e-2


@torch.no_grad()
def try_walk(base: Any, backbone: Backbone) -> None:
    """Read a few tokens both ways; ValueError where they differ, a warning where rows depend on each other."""
    token_ids = torch.arange(NUM_TOKENS, device=backbone.device) * 7 % backbone.vocab_size
    own = base(token_ids.unsqueeze(0), use_cache=False).logits[0].float()
    tolerance = TOLERANCE.get(backbone.dtype, HALF_TOLERANCE) * own.abs().max()
    if not (_walk(backbone, token_ids) - own).abs().max() <= tolerance:
        raise ValueError(
            "the base with its adapters or quantised layers, walked layer by layer, does not say what its own forward "
            "says; merge its adapters (merge_and_unload), or use the base without them"
        )
    alone = base(token_ids[:1].unsqueeze(0), use_cache=False).logits[0].float()
    if not (alone[0] - own[0]).abs().max() <= tolerance:
        warnings.warn(
            "the base's quantised layers round a token by all that is read together with it: its texts depend on how "
            "many tokens are read at once, and need not be those of generate",
            stacklevel=4,
        )


def _walk(backbone: Backbone, token_ids: Tensor) -> Tensor:  # [T] int64 -> [T, V] float32
    positions = torch.arange(len(token_ids), device=backbone.device)
    hidden = backbone.embed(token_ids, positions)
    hidden = backbone.run_layers(hidden, 0, backbone.num_layers, positions, DenseAttention([len(token_ids)]))
    return backbone.logits(backbone.final_norm(hidden))[0].float()
