"""Exact mode: the same bits in whatever company a row is computed, tried on this machine before it is promised.

What holds by construction: attention (see `exact_attention`), element-wise functions and sampling, which are called
row by row. What is tried: the products, on all kernels that they will ever call (see `TiledProduct`), and layers of
the model as a whole, so that an architecture that computes in yet another way is noticed.
"""

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from ..heads import Backbone, EarlyExitModel
from .attention import PagedAttention, Span
from .kv_cache import KVCache

PIECES = (1, 2, 4, 1, 9, 17, 3)
"""How many tokens of a trial are read at once, one piece after the other."""
BLOCK_SIZE = 4


@torch.inference_mode()
def build_exact(model: EarlyExitModel) -> EarlyExitModel:
    """A row-invariant twin of `model`; raises ValueError, after up to a second, where it fails its trials."""
    backbone = model.backbone
    try:
        exact = model.row_invariant()
    except ValueError as error:
        raise ValueError(f"exact mode cannot serve this model: {error}; leave out exact") from None
    try_products(exact)
    if not _reads_alike(exact.backbone):
        raise ValueError(
            f"exact mode is not possible {_where(backbone)}: layers of this model read a text in pieces otherwise than "
            "at once; choose another dtype or leave out exact"
        )
    return exact


@torch.inference_mode()
def try_products(exact: EarlyExitModel) -> None:
    """Try the kernels of all products of a model of `build_exact`; with other weights they may be others."""
    for product in exact.backbone.tiled_products():
        if not product.is_invariant():
            shape = "x".join(map(str, product.shape))
            raise ValueError(
                f"exact mode is not possible {_where(exact.backbone)}: the product with a {shape} matrix depends on "
                "the number of rows; choose another dtype or leave out exact"
            )


def _where(backbone: Backbone) -> str:
    return f"on this {backbone.device.type} in {str(backbone.dtype).removeprefix('torch.')}"


def _reads_alike(backbone: Backbone) -> bool:
    """Whether two texts come out the same, each at once and by itself, or in pieces side by side."""
    length = min(sum(PIECES), backbone.max_context)
    ids = torch.randint(backbone.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    num_blocks = -(-length // BLOCK_SIZE)
    tables = [list(range(first, 2 * num_blocks, 2)) for first in (0, 1)]
    cache = KVCache(
        backbone.num_layers,
        2 * num_blocks,
        BLOCK_SIZE,
        backbone.num_kv_heads,
        backbone.head_dim,
        backbone.dtype,
        backbone.device,
    )
    layers = _layers_to_try(backbone)

    def read(texts: list[int], start: int, stop: int) -> Tensor:  # [len(texts), stop - start, V]
        attend = PagedAttention(
            cache, [Span(tables[text], start, stop) for text in texts], backbone.device, is_exact=True
        )
        positions = torch.arange(start, stop, device=backbone.device).repeat(len(texts))
        hidden = backbone.embed(ids[texts, start:stop].flatten().to(backbone.device), positions)
        for layer in layers:
            hidden = backbone.run_layers(hidden, layer, layer + 1, positions, attend)
        return backbone.logits(backbone.final_norm(hidden)).view(len(texts), stop - start, -1)

    alone = torch.cat([read([0], 0, length), read([1], 0, length)])
    start = 0
    for number, size in enumerate(PIECES):
        stop = min(start + size, length)
        order = [0, 1] if number % 2 else [1, 0]
        if start < stop and not torch.equal(read(order, start, stop), alone[order, start:stop]):
            return False
        start = stop
    return True


def _layers_to_try(backbone: Backbone) -> list[int]:
    """The first layer of each kind, and the last."""
    first: dict[Hashable, int] = {}
    for index, layer in enumerate(backbone.layers):
        first.setdefault(_kind(layer), index)
    return sorted({*first.values(), backbone.num_layers - 1})


def _kind(layer: nn.Module) -> Hashable:
    shapes = tuple((name, tensor.shape) for name, tensor in layer.state_dict().items())
    return shapes, tuple((type(part), getattr(part, "sliding_window", None)) for part in layer.modules())
