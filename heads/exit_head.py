"""An exit head: from the hidden state at an exit layer to a state that the base's LM head can read.

T tokens side by side in a packed batch; D hidden size; V_d draft vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backbone import AnyLayer, Attend, Backbone
from .config import ExitHeadConfig
from .fused_linear import fused_products
from .kernel_types import Native
from .lean_layer import LeanLayer
from .low_rank import add_deltas, new_deltas
from .product import Product
from .state_rows import JoinedRows, StateRows, States, join, states_of


class ExitHead(nn.Module):
    """`norm(transform(fuse(hidden, context)))`; the LM head behind it is the base's own and is not part of it.

    Every part starts as a copy of the base's or as the identity, so that an untrained head is the raw exit
    (behind one layer of the base for kinds `block` and `lora`).
    """

    draft_vocab_ids: Tensor | None

    def __init__(self, config: ExitHeadConfig, backbone: Backbone, kv_layer: int) -> None:
        super().__init__()
        size, dtype, device = backbone.hidden_size, backbone.dtype, backbone.device
        self.config = config
        self.kv_layer = kv_layer
        """Where the block's keys and values live, counted on after the base's layers."""
        self.has_block = config.kind in ("block", "lora")
        """Whether it runs a decoder layer, with keys and values of its own."""
        self._backbone = backbone
        self.fuse: nn.Linear | None = None
        self.mlp: nn.Linear | None = None
        self.block: nn.Module | None = None
        self.deltas: nn.ModuleDict | None = None
        self.norm: nn.Module | None = None
        if config.committed_context:
            self.fuse = nn.Linear(2 * size, size, bias=False, dtype=dtype, device=device)
            nn.init.zeros_(self.fuse.weight)
            nn.init.eye_(self.fuse.weight.data[:, :size])
        if config.kind == "mlp":
            self.mlp = nn.Linear(size, size, dtype=dtype, device=device)
            nn.init.zeros_(self.mlp.weight)
            nn.init.zeros_(self.mlp.bias)
        if config.kind == "block":
            self.block = backbone.copy_layer(config.exit_layer)
        if config.kind == "lora":
            assert config.lora_rank is not None
            layer = backbone.share_layer(config.exit_layer)
            self.deltas = new_deltas(layer, config.lora_rank, dtype, device)
        if config.kind != "shared":
            self.norm = backbone.copy_final_norm()
        self.bind()
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size, device=backbone.device)
        self.register_buffer("draft_vocab_ids", ids)

    def bind(self) -> None:
        """Compute with the tensors that the head has now: for when others were put in their places."""
        self._by_fuse = None if self.fuse is None else Product(self.fuse.weight)
        self._by_mlp = None if self.mlp is None else Product(self.mlp.weight, self.mlp.bias)
        # For training, and for inference; in a tuple: not a part with tensors of its own.
        self._blocks: tuple[nn.Module, ...] = ()
        self._lean: tuple[AnyLayer, ...] = ()
        if self.block is not None:
            fused = self._backbone.fused(self.block)
            self._blocks = (self.block, fused)
            self._lean = (self._backbone.lean(fused),)
        if self.deltas is not None:
            backbone, index = self._backbone, self.config.exit_layer
            layers = (backbone.share_layer(index), backbone.share_fused_layer(index))
            self._blocks = tuple(add_deltas(layer, dict(self.deltas.items())) for layer in layers)
            self._lean = self._blocks[1:]

    def forward(
        self,
        hidden: Tensor | StateRows,  # [1, T, D] or where they lie, at the exit layer
        context: Tensor | StateRows | None,  # as the base's newest committed token has it, final; zeros where none is
        positions: Tensor,  # [T] int64
        attend: Attend,
    ) -> Tensor:  # [1, T, D]
        """The state that the LM head reads; `context` is read only by a head with committed context."""
        # Whoever wraps the head to train it over several machines brings a weight here when its module is called.
        is_training = torch.is_grad_enabled()
        states: States = hidden
        if self._by_fuse is not None:
            assert self.fuse is not None
            assert context is not None
            if isinstance(hidden, StateRows) and isinstance(context, StateRows):
                states = JoinedRows(hidden, context, self._by_fuse)
            else:
                both = join(states_of(hidden), states_of(context))
                states = self.fuse(both) if is_training else self._by_fuse(both)
        if self._by_mlp is not None:
            assert self.mlp is not None
            shallow = states_of(states)
            states = shallow + F.silu(self.mlp(shallow) if is_training else self._by_mlp(shallow))
        if self.has_block:
            assert self.norm is not None
            block = self._blocks[0] if is_training else self._lean[0]
            return self._backbone.run_block(block, self.kv_layer, states, positions, attend, self.norm)
        last = states_of(states)
        return self._backbone.final_norm(last) if self.norm is None else self._backbone.norm(self.norm, last)

    @property
    def may_be_native(self) -> bool:
        """Whether it is of a kind that `step` takes."""
        is_lean = bool(self._lean) and isinstance(self._lean[0], LeanLayer)
        return is_lean and self._by_mlp is None and self.norm is not None

    def step(
        self,
        hidden: StateRows,
        context: StateRows | None,
        positions: Tensor,
        attend: Attend,
        *,
        keeps_only: bool = False,  # nothing but the block's keys and values is wanted
    ) -> Native[Tensor] | None:  # [1, T, D]
        """`forward` as a step of our own kernels; None where these do not take it."""
        is_watched = self._forward_hooks or self._forward_pre_hooks
        if not self.may_be_native or is_watched or torch.is_grad_enabled():
            return None
        assert self.norm is not None
        states: States = hidden
        if self._by_fuse is not None:
            assert context is not None
            states = JoinedRows(hidden, context, self._by_fuse)
        return self._backbone.block_step(
            self._lean[0], self.kv_layer, states, positions, attend, self.norm, keeps_only=keeps_only
        )

    def products(self) -> Iterator[Product]:
        """Those of its own weights, by which it computes where nothing is trained."""
        for product in (self._by_fuse, self._by_mlp):
            if product is not None:
                yield product
        if self.block is not None:
            yield from fused_products(self._blocks[1])


def context_positions(
    positions: Tensor,  # [T] int64
    last_known: Tensor,  # [T] int64, newest position whose final state is known
) -> Tensor:  # [T] int64; -1 means that there is none yet
    """Whose final state a row takes as its committed context: the position before it, or the newest that is known.

    The one rule for training and inference, so that a head's cache holds what the head was trained on.
    """
    return torch.minimum(positions - 1, last_known)


def context_position(position: int, last_known: int) -> int:
    """As `context_positions`, of one row."""
    return min(position - 1, last_known)
