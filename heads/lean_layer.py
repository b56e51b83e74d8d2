"""A decoder layer of the Llama family by fewer operations than the library's own.

With few rows a layer is some fifty small operations around four products, and they take as long as these. The
mathematics is the architecture's own: what is put together here is the rotation of queries and keys, and the norm's
elementary steps, on a CPU to the same bits; or, for the fewest rows, all that stands before attention and all behind
it, by `kernels`.

T tokens side by side; D hidden size; H query heads, Hkv key heads, Dh head size.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from .attention import DenseAttention
from .fused_linear import FusedPart
from .kernel_types import Heads, Layer, Layers, Native, Norm
from .kernels import MAX_TILED_ROWS, find_kernels
from .product import Product
from .rotary import Rotary
from .state_rows import JoinedRows, StateRows, States, rows_of

if TYPE_CHECKING:
    from .backbone import Attend

FAMILY = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of transformers that compute in this way."""

TRIAL_LENGTHS = (5, MAX_TILED_ROWS + 1)
"""Tokens of the sequences over which a layer is tried: few, as kernels take, and more."""


class LeanLayer:
    """Runs a layer of `FAMILY` that `fuse_linears` went through, over the tensors that it has."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv, self._output = attention.q_proj.fused, attention.o_proj.fused
        self._gate_up, self._down = mlp.gate_proj.fused, mlp.down_proj.fused
        self._norms: list[Any] = [
            layer.input_layernorm,
            layer.post_attention_layernorm,
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        ]
        self._activation = mlp.act_fn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.config.num_attention_heads
        self._num_kv_heads: int = attention.config.num_key_value_heads
        self._scaling: float = attention.scaling
        window = getattr(attention, "sliding_window", None)
        if "Mistral" in type(layer).__name__:
            window = getattr(attention.config, "sliding_window", None)
        self.window: int | None = window
        self._is_silu = isinstance(self._activation, (nn.SiLU, SiLUActivation))
        self._fused = (self._qkv, self._output, self._gate_up, self._down)
        self.parameters: list[dict[str, nn.Parameter | None]] = [
            *(fused.first_parameters for fused in self._fused),
            *(norm._parameters for norm in self._norms if norm is not None),
        ]
        """What it computes with, by module."""
        self.alone = LayerRun([self], watches=True)

    def __call__(
        self,
        hidden: Tensor,  # [1, T, D]
        rotary: Rotary,
        attend: "Attend",
        kv_layer: int,
    ) -> Tensor:  # [1, T, D]
        """As the library's layer."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        options: dict[str, Any] = {"scaling": self._scaling, "window": self.window, "softcap": None}
        kernels = find_kernels()
        if (
            kernels is not None
            and hidden.shape[1] <= MAX_TILED_ROWS
            and kernels.takes(hidden)
            and (alone := self.alone.describe(hidden.dtype, hidden.shape[1], rotary)) is not None
        ):
            (layer,) = alone.layers
            heads = kernels.before_attention(layer, hidden, rotary)
            query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            attended = attend(kv_layer, query, key, value, **options)
            return kernels.after_attention(layer, hidden, attended)
        heads = self._qkv(rms_norm(self._norms[0], hidden)).view(hidden.shape[1], -1, self._head_dim)
        q_norm, k_norm = self._norms[2:]
        if q_norm is None or k_norm is None:
            query, key, value = rotary.turn(heads[:, : num_heads + num_kv_heads]), None, heads[:, -num_kv_heads:]
            query, key = query[:, :num_heads], query[:, num_heads:]
        else:
            query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            query, key = rotary.turn(rms_norm(q_norm, query)), rotary.turn(rms_norm(k_norm, key))
        attended = attend(kv_layer, query, key, value, **options)
        hidden = hidden + self._output(attended.reshape(1, hidden.shape[1], -1))
        gate, up = self._gate_up(rms_norm(self._norms[1], hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate).mul_(up))

    @property
    def products(self) -> list[Product]:
        """Its four."""
        return [fused.product for fused in self._fused]

    def tell(self, dtype: torch.dtype, rotary: Rotary) -> Layer | None:
        """The layer as kernels take it; None where they do not: another activation, other types than the states'
        `dtype`, heads that are turned in part."""
        products = self.products
        norms = [None if norm is None else norm.weight.detach() for norm in self._norms]
        weights = [tensor for product in products for tensor in (product.weight, product.bias)]
        are_alike = all(tensor is None or tensor.dtype == dtype for tensor in (*weights, *norms, rotary.cos))
        if not self._is_silu or not are_alike or rotary.cos.shape[-1] != self._head_dim:
            return None
        eps = [0.0 if norm is None else norm.variance_epsilon for norm in self._norms]
        heads = Heads(self._num_heads, self._num_kv_heads, self._head_dim)
        linears = products[0].linear(), products[1].linear(), products[2].linear(), products[3].linear()
        return Layer.of(linears, norms, eps, heads, window=self.window, scaling=self._scaling)


class LayerRun:
    """Layers that run one after the other, as kernels take them: told once, and anew when a tensor has changed."""

    def __init__(
        self,
        layers: Sequence[LeanLayer],
        *,
        watches: bool,  # look for changes whenever asked; else only after `follow`, for many tensors take their time
    ) -> None:
        self._layers = layers
        self._watches = watches
        self._is_followed = False
        self._kind: tuple[Any, ...] = ()
        self._parameters = [parameters for layer in layers for parameters in layer.parameters]
        self._products: list[Product] = []
        self._weights: list[Tensor] = []
        self._state: list[Any] = []
        self._told: Layers | None = None
        self._max_rows = 0

    def follow(self) -> None:
        """Look for changes when asked next."""
        self._is_followed = False

    def describe(self, dtype: torch.dtype, num_rows: int, rotary: Rotary) -> Layers | None:
        """The layers for states of a type; None where kernels do not take one of them, or so many rows."""
        kind = dtype, rotary.cos.dtype, rotary.cos.shape[-1]
        if kind != self._kind or not self._is_followed:
            if kind != self._kind or self._find_state() != self._state:
                self._tell(dtype, rotary)
                self._kind, self._state = kind, self._find_state()
            self._is_followed = not self._watches
        return self._told if num_rows <= self._max_rows else None

    def _find_state(self) -> list[Any]:
        """What changes when a tensor is moved, written to or put in the place of another, or is packed."""
        places = [
            tensor.data_ptr() for tensors in self._parameters for tensor in tensors.values() if tensor is not None
        ]
        versions = [weight._version for weight in self._weights]
        return [places, versions, [product.told for product in self._products]]

    def _tell(self, dtype: torch.dtype, rotary: Rotary) -> None:
        told = [layer.tell(dtype, rotary) for layer in self._layers]
        known = [layer for layer in told if layer is not None]
        self._told = Layers(known) if len(known) == len(told) else None
        self._products = [product for layer in self._layers for product in layer.products]
        self._weights = [product.weight for product in self._products if not product.weight.is_inference()]
        self._max_rows = min((product.max_native_rows for product in self._products), default=MAX_TILED_ROWS)


def layers_step(
    layers: LayerRun,
    first_kv_layer: int,  # of the first layer; the next ones follow
    states: States,
    rotary: Rotary,
    attend: "Attend",
    norm: Any | None = None,  # of the library's class that `rms_norm` knows, of what the last layer gives
    keep: StateRows | None = None,  # where what is returned is put as well
    *,
    keeps_only: bool = False,  # of a single layer nothing but its keys and values
) -> Native[Tensor] | None:  # [1, T, D]
    """Layers one after the other as a single step; None where kernels do not take them with all their attention."""
    kernels, pages = find_kernels(), getattr(attend, "pages", None)
    if kernels is None or pages is None:
        return None
    source = rows_of(states)
    dtype, num_rows = source.table.dtype, source.num_rows
    if not kernels.takes(source.table) or not (num_rows and pages.pools.dtype == dtype and _are_fit(source, keep)):
        return None
    described = layers.describe(dtype, num_rows, rotary)
    if described is None:
        return None
    by_norm = None if norm is None else Norm.of(norm.weight.detach(), norm.variance_epsilon)
    return kernels.layers_step(described, first_kv_layer, source, rotary, pages, by_norm, keep, keeps_only=keeps_only)


def _are_fit(source: StateRows | JoinedRows, keep: StateRows | None) -> bool:
    """Whether kernels take all tables of a call, and the product of what is joined."""
    tables = [source.table] if keep is None else [source.table, keep.table]
    if isinstance(source, JoinedRows):
        tables += [source.context.table, source.fuse.weight]
        if source.num_rows > source.fuse.max_native_rows:
            return False
    return all(table.dtype == source.table.dtype and table.is_contiguous() for table in tables)


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    """`norm(hidden)`, without gradients, of the library's class, which scales in the input's own type."""
    normed = F.rms_norm(hidden.float(), hidden.shape[-1:], None, norm.variance_epsilon)
    return normed.to(hidden.dtype).mul_(norm.weight)


def is_of_family(layer: nn.Module) -> bool:
    """Whether a layer that `fuse_linears` went through is one of `FAMILY`, with nothing but plain linear layers."""
    if type(layer).__name__ not in FAMILY or not type(layer).__module__.startswith("transformers."):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    return _are_one(attention, ("q_proj", "k_proj", "v_proj"), ("o_proj",)) and _are_one(
        mlp, ("gate_proj", "up_proj"), ("down_proj",)
    )


def _are_one(module: Any, *groups: Iterable[str]) -> bool:
    """Whether the linear layers of each group are all that one `FusedLinear` computes."""
    for names in groups:
        parts = [vars(module).get(name) for name in names]
        if not all(isinstance(part, FusedPart) for part in parts):
            return False
        if len({id(part.fused) for part in parts}) > 1 or parts[0].fused.num_linears != len(parts):
            return False
    return True


@torch.inference_mode()
def agrees(
    layer: nn.Module,
    lean: LeanLayer,
    cos: Tensor,  # [1, T, Dh], the library's
    sin: Tensor,
    hidden: Tensor,  # [1, T, D]
) -> bool:
    """Whether `lean` does what `layer` does: tried, so that another version of the library cannot change it unseen."""
    asked: list[tuple[int, dict[str, Any]]] = []
    dense = DenseAttention([hidden.shape[1]])

    def attend(kv_layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        asked.append((kv_layer, options))
        return dense(kv_layer, query, key, value, **options)

    positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    expected = layer(hidden, position_ids=positions, attend=attend, kv_layer=0, position_embeddings=(cos, sin))
    found = lean(hidden, Rotary.of(cos, sin), attend, 0)
    of_layer, of_lean = asked
    # Other kernels sum in another order, and what is lost is a share of the largest that is summed.
    tolerance = 64 * torch.finfo(hidden.dtype).eps
    largest = max(1.0, float(expected.abs().max()))
    return of_layer == of_lean and torch.allclose(found, expected, rtol=tolerance, atol=tolerance * largest)
