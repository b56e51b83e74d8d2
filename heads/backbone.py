"""The frozen base model, walked by parts. With `architectures`, the only file that knows Hugging Face internals.

T tokens lie side by side in one packed batch; D hidden size; V vocabulary; H query heads, Hkv key heads, Dh head size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from .architectures import find_parts, max_context
from .fused_linear import fuse_linears, fused_products
from .kernel_types import Native
from .kernels import MAX_TILED_ROWS, TILE_ROWS, find_kernels
from .lean_layer import TRIAL_LENGTHS, LayerRun, LeanLayer, agrees, is_of_family, layers_step, rms_norm
from .product import Product
from .rotary import Rotary, RotaryTable
from .row_invariance import TiledProduct, row_invariant, tiled_products
from .stand_in import is_plain_embedding, is_plain_linear, is_stand_in, plain_copy, read_weight
from .state_rows import StateRows, States, rows_of, states_of
from .step_chain import run_native

ATTENTION_NAME = "hispec"


AnyLayer = LeanLayer | nn.Module
"""What runs a decoder layer."""


class Attend(Protocol):
    """Attention over whatever the caller keeps: a paged cache in inference, the packed batch itself in training.

    One that has `pages` lets our own kernels do the same with them, see `Kernels.paged_attention`; one that has
    `num_positions`, more than any of a pass, lets what turns queries and keys be looked up.
    """

    def __call__(
        self,
        kv_layer: int,  # where this layer's keys and values live; heads count on after the base's layers
        query: Tensor,  # [T, H, Dh]
        key: Tensor,  # [T, Hkv, Dh], the new tokens only
        value: Tensor,  # [T, Hkv, Dh]
        *,
        scaling: float,
        window: int | None,  # sliding window in tokens, the token itself included
        softcap: float | None,
    ) -> Tensor: ...  # [T, H, Dh]


class Backbone:
    """Runs any part of `base`: embedding, a range of decoder layers, final norm, LM head.

    Its layers are twins that share the base's tensors but call hispec's attention, so that the base object itself
    runs as ever. What stands in for a plain layer, an adapter of peft or a quantised layer, is the base's own module.
    Raises ValueError for an architecture that is not supported.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        config = base.config
        parts = find_parts(base)
        AttentionInterface.register(ATTENTION_NAME, _call_attend)
        twin_config = copy.deepcopy(config)
        twin_config._attn_implementation = ATTENTION_NAME
        self.layers = [_twin(layer, twin_config) for layer in parts.layers]
        self._twin_config = twin_config
        for layer in self.layers:
            fuse_linears(layer)
        self.parts = parts
        for module in (*parts.layers, parts.embed_positions):
            if module is not None and is_stand_in(module):
                raise ValueError(
                    f"the base's {type(module).__name__} is an adapter's own, which exit heads cannot follow; "
                    "use the base without that adapter"
                )
        self._base = base
        self.lm_head = base.get_output_embeddings()
        self._lm_head_product: Product | None = None
        if is_plain_linear(self.lm_head):
            self._lm_head_product = Product(self.lm_head.weight, self.lm_head.bias)
        self._by_lm_head: Callable[[Tensor], Tensor] = self._lm_head_product or self.lm_head
        self.num_layers = len(self.layers)
        self.hidden_size: int = config.hidden_size
        head = self.lm_head
        self.vocab_size: int = head.out_features if self._lm_head_product is None else head.weight.shape[0]
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_context = max_context(config)
        self._rotary_table = RotaryTable(parts.rotary) if RotaryTable.serves(parts.rotary) else None
        self._are_lean = all(map(is_of_family, self.layers)) and self._try_lean()
        self._runs: list[AnyLayer] = [self.lean(layer) for layer in self.layers]
        self._layer_runs: dict[tuple[int, int], LayerRun] = {}
        self._lean_norm = type(cast(Any, self.layers[0]).input_layernorm) if self._are_lean else None

    @property
    def dtype(self) -> torch.dtype:
        """The base's floating-point type."""
        return self._base.dtype if self._lm_head_product is None else self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the base lies."""
        return self._base.device if self._lm_head_product is None else self.lm_head.weight.device

    def products(self) -> Iterator[Product]:
        """Those of the layers and the LM head."""
        for layer in self.layers:
            yield from fused_products(layer)
        if self._lm_head_product is not None:
            yield self._lm_head_product

    def follow_tensors(self) -> None:
        """To be called when the base's tensors may have changed: our own kernels read them where they lay."""
        for run in self._layer_runs.values():
            run.follow()

    def row_invariant(self) -> "Backbone":
        """A backbone over the same tensors, packed copies included, whose rows do not depend on each other's number.

        As far as `TiledProduct` holds on this machine; attention is the caller's. Raises ValueError for layers that
        multiply in other ways.
        """
        if self._lm_head_product is None:
            raise ValueError("its LM head is no plain linear layer, but adapted or quantised")
        twin = copy.copy(self)
        twin.layers = [row_invariant(layer) for layer in self.layers]
        twin._runs = list(twin.layers)
        twin._are_lean, twin._lean_norm = False, None
        twin._by_lm_head = TiledProduct(self._lm_head_product)
        twin.parts = self.parts._replace(
            project_in=self._tiled(self.parts.project_in), project_out=self._tiled(self.parts.project_out)
        )
        return twin

    def _tiled(self, linear: Any) -> TiledProduct | None:
        if linear is None:
            return None
        if not is_plain_linear(linear):
            raise ValueError("its projection is no plain linear layer, but adapted or quantised")
        product = Product(linear.weight, linear.bias)
        assert self._lm_head_product is not None
        if self._lm_head_product.is_packed:
            product.pack()
        return TiledProduct(product)

    def tiled_products(self) -> list[TiledProduct]:
        """Of a row-invariant backbone, one product of each kind."""
        of_kind = {}
        for module in (*self.layers, self._by_lm_head, self.parts.project_in, self.parts.project_out):
            if isinstance(module, nn.Module):
                of_kind.update({product.kind: product for product in tiled_products(module)})
        return list(of_kind.values())

    def embed(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
    ) -> Tensor:  # [1, T, D]
        """What the first decoder layer takes: the hidden state at exit layer 0."""
        hidden = self.parts.embed_tokens(token_ids.unsqueeze(0))
        if self.parts.project_in is not None:
            hidden = self.parts.project_in(hidden)
        if self.parts.embed_positions is not None:
            rows = positions.unsqueeze(0) + self.parts.first_position
            hidden = hidden + F.embedding(rows, self.parts.embed_positions.weight)
        if self.parts.embed_multiplier is not None:
            hidden = hidden * self.parts.embed_multiplier
        return hidden

    def embedded(self, token_ids: Tensor, positions: Tensor) -> States:  # [T] int64 each
        """As `embed`, or where it lies, where the first decoder layer takes rows of the embedding as they are."""
        embedding = self.parts.embed_tokens
        if not self._are_lean or not is_plain_embedding(embedding):
            return self.embed(token_ids, positions)
        return StateRows(cast(Tensor, embedding.weight).detach(), token_ids)

    def run_layers(
        self,
        hidden: States,
        start: int,
        stop: int,  # exclusive
        positions: Tensor,  # [T] int64
        attend: Attend,
    ) -> Tensor:  # [1, T, D]
        """Decoder layers `[start, stop)`."""
        return self.run_through(hidden, start, [stop], positions, attend)[0]

    def run_through(
        self,
        hidden: States,
        start: int,
        stops: Sequence[int],  # exclusive, rising
        positions: Tensor,  # [T] int64
        attend: Attend,
        *,
        norms: bool = False,  # whether the last of them ends with the final norm
        keeps: Sequence[StateRows | None] | None = None,  # where each of them is put as well
    ) -> list[Tensor]:  # [1, T, D] each
        """Decoder layers from `start` on; the states before each of `stops`."""
        keeps = keeps or [None] * len(stops)
        if (found := self.layers_steps(hidden, start, stops, positions, attend, norms=norms, keeps=keeps)) is not None:
            return run_native(found)
        rotaries: dict[str | None, Any] = {}
        states, at = [], states_of(hidden)
        for stop, keep in zip(stops, keeps, strict=True):
            for index, layer in enumerate(self._runs[start:stop], start):
                layer_type = self._rotary_type(layer)
                if layer_type not in rotaries:
                    rotaries[layer_type] = self._rotary(at, positions, layer, attend)
                at = self._run_layer(layer, index, at, positions, rotaries[layer_type], attend)
            start = stop
            states.append(self.final_norm(at) if norms and stop == stops[-1] else at)
            if keep is not None:
                keep.put(states[-1])
        return states

    def layers_steps(
        self,
        hidden: States,
        start: int,
        stops: Sequence[int],
        positions: Tensor,
        attend: Attend,
        *,
        norms: bool,
        keeps: Sequence[StateRows | None],
    ) -> Native[list[Tensor]] | None:
        """`run_through` as steps of our own kernels; None where these do not take it."""
        norm = self.parts.final_norm if norms else None
        may_norm = norm is None or self._is_lean_norm(norm, rows_of(hidden).table.dtype)
        if not self._are_lean or not _may_be_native(attend) or not may_norm:
            return None
        rotary = self._rotary(rows_of(hidden).table, positions, self._runs[0], attend)
        steps, states = [], []
        for stop, keep in zip(stops, keeps, strict=True):
            own_norm = norm if stop == stops[-1] else None
            found = layers_step(self._layer_run(start, stop), start, hidden, rotary, attend, own_norm, keep)
            if found is None:
                return None
            steps += found.steps
            states.append(found.output)
            hidden, start = StateRows(found.output[0], None, rows_of(hidden).number), stop
        return Native(steps, states)

    def run_block(
        self,
        block: AnyLayer,  # a layer made by `copy_layer`, or what `lean` makes of one
        kv_layer: int,
        hidden: States,
        positions: Tensor,  # [T] int64
        attend: Attend,
        norm: nn.Module,  # of what it gives, see `norm`
    ) -> Tensor:  # [1, T, D]
        """One decoder layer of an exit head's own, and the head's norm."""
        if (found := self.block_step(block, kv_layer, hidden, positions, attend, norm)) is not None:
            return run_native(found)
        at = states_of(hidden)
        rotary = self._rotary(at, positions, block, attend)
        return self.norm(norm, self._run_layer(block, kv_layer, at, positions, rotary, attend))

    def block_step(
        self,
        block: AnyLayer,
        kv_layer: int,
        hidden: States,
        positions: Tensor,
        attend: Attend,
        norm: nn.Module,
        *,
        keeps_only: bool = False,  # nothing but keys and values is wanted
    ) -> Native[Tensor] | None:
        """`run_block` as a step of our own kernels; None where these do not take it."""
        table = rows_of(hidden).table
        if not isinstance(block, LeanLayer) or not _may_be_native(attend) or not self._is_lean_norm(norm, table.dtype):
            return None
        rotary = self._rotary(table, positions, block, attend)
        own_norm = None if keeps_only else norm
        return layers_step(block.alone, kv_layer, hidden, rotary, attend, own_norm, keeps_only=keeps_only)

    @property
    def has_rotary_table(self) -> bool:
        """Whether what turns queries and keys is looked up by position, so that steps may be done again elsewhere."""
        return self._rotary_table is not None

    @property
    def row_step(self) -> int:
        """Rows that all products take at once, in about the time of one; 1 where each takes its own."""
        kernels = find_kernels()
        is_tiled = kernels is not None and all(each.max_native_rows == MAX_TILED_ROWS for each in self.products())
        return TILE_ROWS if is_tiled else 1

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The base's final state, `[..., D]` to `[..., D]`; the identity where the base has no final norm."""
        return hidden if self.parts.final_norm is None else self.norm(self.parts.final_norm, hidden)

    def norm(self, module: nn.Module, hidden: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """`module(hidden)` of the final norm or a copy of it; where nothing is trained by fewer operations."""
        return rms_norm(module, hidden) if self._is_lean_norm(module, hidden.dtype) else module(hidden)

    def _is_lean_norm(self, module: Any, dtype: torch.dtype) -> bool:
        is_known = type(module) is self._lean_norm and module.weight.dtype == dtype
        return is_known and not torch.is_grad_enabled()

    def logits(
        self,
        state: Tensor,  # [..., D], after a norm
        rows: Product | None = None,  # from `lm_head_rows`
    ) -> Tensor:  # [..., V], or [..., V_d] by `rows`
        """The base's LM head, or some of its rows, scaled and capped as the base does."""
        parts = self.parts
        if parts.project_out is not None:
            state = parts.project_out(state)
        logits = (rows or self._by_lm_head)(state)
        if parts.logit_multiplier is not None:
            logits = logits * parts.logit_multiplier
        if parts.logit_divisor is not None:
            logits = logits / parts.logit_divisor
        if parts.logit_cap is not None:
            logits = torch.tanh(logits / parts.logit_cap) * parts.logit_cap
        return logits

    def logits_step(self, state: StateRows, rows: Product | None = None) -> Native[Tensor] | None:
        """`logits` as a step of our own kernels; None where these do not take it."""
        parts, product = self.parts, rows or self._by_lm_head
        extra = (parts.project_out, parts.logit_multiplier, parts.logit_divisor, parts.logit_cap)
        is_plain = all(each is None for each in extra)
        return product.step(state) if is_plain and isinstance(product, Product) else None

    def lm_head_rows(self, token_ids: Tensor) -> Product:  # token_ids: [V_d] int64
        """The LM head's rows for `token_ids`, gathered (the base's own are not contiguous for them)."""
        if self._lm_head_product is None:
            return Product(*read_weight(self.lm_head, self.dtype, self.device, token_ids))
        bias = self.lm_head.bias
        return Product(
            self.lm_head.weight.detach()[token_ids].contiguous(),
            None if bias is None else bias.detach()[token_ids],
        )

    def copy_layer(self, index: int) -> nn.Module:
        """A trainable copy of decoder layer `index`, to be run by `run_block`."""
        layer = plain_copy(self.parts.layers[index], self.dtype, self.device)
        return _twin(layer, self._twin_config).requires_grad_(True)

    def share_layer(self, index: int) -> nn.Module:
        """A module tree of its own over the base's tensors of decoder layer `index`, differentiable in its input."""
        return _twin(self.parts.layers[index], self._twin_config)

    def share_fused_layer(self, index: int) -> nn.Module:
        """As `share_layer`, for inference: over the products of this backbone's own layer, packed as they are."""
        return _twin(self.layers[index], self._twin_config)

    def fused(self, block: nn.Module) -> nn.Module:
        """A twin of a `copy_layer` for inference: the same tensors, nothing differentiates through it."""
        twin = _twin(block, self._twin_config)
        fuse_linears(twin)
        return twin

    def lean(self, layer: nn.Module) -> AnyLayer:
        """What runs a layer at inference: fewer operations where this backbone's layers are of a known kind."""
        return LeanLayer(layer) if self._are_lean and is_of_family(layer) else layer

    def copy_final_norm(self) -> nn.Module:
        """A trainable copy of the base's final norm; a fresh LayerNorm where the base has none."""
        norm = self.parts.final_norm
        if norm is None:
            return nn.LayerNorm(self.hidden_size, dtype=self.dtype, device=self.device)
        return plain_copy(norm, self.dtype, self.device).requires_grad_(True)

    def _layer_run(self, start: int, stop: int) -> LayerRun:
        if (start, stop) not in self._layer_runs:
            self._layer_runs[start, stop] = LayerRun(cast(list[LeanLayer], self._runs[start:stop]), watches=False)
        return self._layer_runs[start, stop]

    def _rotary_type(self, layer: Any) -> str | None:
        return str(layer.self_attn.layer_type) if self.parts.rotary_by_layer_type else None

    def _rotary(self, like: Tensor, positions: Tensor, layer: AnyLayer, attend: Attend | None = None) -> Any:
        """What turns queries and keys, in the form that `layer` takes, and of the type of states `like` these."""
        if self.parts.rotary is None:
            return None
        num_positions: int | None = getattr(attend, "num_positions", None)
        table = self._rotary_table if positions.device.type == "cpu" and isinstance(layer, LeanLayer) else None
        if table is not None and num_positions is not None:
            return table(like, positions, num_positions)
        layer_type = self._rotary_type(layer)
        extra = {} if layer_type is None else {"layer_type": layer_type}
        rotary = self.parts.rotary(like, position_ids=positions.unsqueeze(0), **extra)
        return Rotary.of(*rotary) if isinstance(layer, LeanLayer) else rotary

    def _try_lean(self) -> bool:
        """Whether lean layers do what the library's do, tried with one of each kind."""
        if self.device.type == "meta":
            return False  # nothing can be tried where nothing is computed
        kinds = {LeanLayer(layer).window: layer for layer in self.layers}
        generator = torch.Generator().manual_seed(0)
        for length in TRIAL_LENGTHS:
            hidden = torch.randn(1, length, self.hidden_size, generator=generator).to(self.device, self.dtype)
            positions = torch.arange(length, device=self.device)
            cos, sin = self._rotary(hidden, positions, self.layers[0])
            if not all(agrees(layer, LeanLayer(layer), cos, sin, hidden) for layer in kinds.values()):
                return False
        return True

    def _run_layer(
        self, layer: AnyLayer, kv_layer: int, hidden: Tensor, positions: Tensor, rotary: Any, attend: Attend
    ) -> Tensor:
        if isinstance(layer, LeanLayer):
            return layer(hidden, rotary, attend, kv_layer)
        extra = {} if rotary is None else {"position_embeddings": rotary}
        return layer(hidden, position_ids=positions.unsqueeze(0), attend=attend, kv_layer=kv_layer, **extra)


def _may_be_native(attend: Attend) -> bool:
    return find_kernels() is not None and getattr(attend, "pages", None) is not None


def _twin(module: nn.Module, config: Any) -> nn.Module:
    """A module tree of its own over the same parameters and buffers, with `config` in place of the base's.

    A stand-in is not doubled: it follows whoever switches, merges or removes its adapter.
    """
    if is_stand_in(module):
        return module.eval()
    twin = copy.copy(module)
    twin._modules = {name: child and _twin(child, config) for name, child in module._modules.items()}
    if hasattr(twin, "config"):
        twin.config = config
    return twin.eval()


def _call_attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dh]
    key: Tensor,  # [1, Hkv, T, Dh]
    value: Tensor,  # [1, Hkv, T, Dh]
    attention_mask: None,
    *,
    scaling: float,
    attend: Attend,
    kv_layer: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, None]:
    """Hand a Hugging Face layer's attention to `attend`.

    What a layer may pass is named: an argument that changes the scores, such as attention sinks, is a TypeError here
    and not a wrong text.
    """
    output = attend(
        kv_layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return output.unsqueeze(0), None
