"""A frozen base model with exit heads.

T tokens side by side in a packed batch; D hidden size; V vocabulary; V_d draft vocabulary.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .architectures import find_parts
from .backbone import Backbone
from .config import ExitHeadConfig, HeadKind, check_exit_layers, head_kinds
from .draft_verifier import DraftVerifier
from .exit_head import ExitHead
from .kernel_types import Native
from .product import Product, TensorState, tensor_state
from .product_form import FormTables
from .stand_in import base_of, stand_ins
from .state_rows import StateRows
from .trial import try_walk


class EarlyExitModel(nn.Module):
    """`base` with one exit head for each of `exit_layers`; the base's tensors are shared and never change.

    Of a PeftModel the base is the model in it, with its adapters. Raises ValueError where the heads cannot follow them.
    """

    def __init__(self, base: PreTrainedModel, configs: Sequence[ExitHeadConfig]) -> None:
        super().__init__()
        base = base_of(base)
        self.base = base.eval().requires_grad_(False)
        self.backbone = Backbone(base)
        if next(stand_ins(base), None) is not None:
            try_walk(base, self.backbone)
        if configs:
            check_exit_layers(tuple(config.exit_layer for config in configs), self.backbone.num_layers)
        for config in configs:
            if config.draft_vocab_size is not None and config.draft_vocab_size > self.backbone.vocab_size:
                raise ValueError(
                    f"draft_vocab_size is {config.draft_vocab_size}, but the base has only "
                    f"{self.backbone.vocab_size} tokens; choose fewer"
                )
        self.heads = nn.ModuleList(
            ExitHead(config, self.backbone, self.backbone.num_layers + index) for index, config in enumerate(configs)
        )
        self._rows: list[Product | None] = [None] * len(self.heads)
        self.forms: FormTables = {}
        """What `use_forms` was told."""
        self.is_packed = False
        """Whether `pack_weights` was called."""
        self.num_changes = 0
        """How often `follow_tensors` has found the tensors changed."""
        self.acceptance: Mapping[str, Any] | None = None
        """How often the heads were measured to be right, from their adapter's run.json; None where it does not tell."""
        self.verifier: DraftVerifier | None = None
        """For the lossy method `sprinter`; None takes that of the adapter, where it has one."""
        self.adapter_folder: Path | None = None
        """Where the heads were read from; None where they were made anew."""
        self.refresh_draft_vocab()
        self._watched = list(self.parameters())
        self._state = self._tensor_state()

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        exit_layers: Sequence[int] = (4, 8),
        head: HeadKind | Sequence[HeadKind] = "block",
        draft_vocab_size: int | None = None,
        *,
        draft_vocab_ids: Tensor | None = None,  # [V_d] int64, distinct
        committed_context: bool = False,
        lora_rank: int | None = None,  # of heads of kind `lora`
    ) -> "EarlyExitModel":
        """New heads, copy-initialised from `base`, all of one kind or each of its own.

        `exit_layers` count the decoder layers run, rising. A draft vocabulary is `draft_vocab_ids`, or else the
        `draft_vocab_size` lowest ids (a BPE vocabulary is roughly sorted by frequency). Raises ValueError for exit
        layers out of range or order, and for what no head can be.
        """
        base = base_of(base)
        check_exit_layers(tuple(exit_layers), len(find_parts(base).layers))
        if draft_vocab_ids is not None:
            draft_vocab_size = len(draft_vocab_ids)
        configs = [
            ExitHeadConfig(
                exit_layer=exit_layer,
                kind=kind,
                committed_context=committed_context,
                draft_vocab_size=draft_vocab_size,
                lora_rank=lora_rank if kind == "lora" else None,
            )
            for exit_layer, kind in zip(exit_layers, head_kinds(head, len(exit_layers)), strict=True)
        ]
        model = cls(base, configs)
        if draft_vocab_ids is not None:
            _check_draft_vocab(draft_vocab_ids, model.backbone.vocab_size)
            for exit_head in model.exit_heads:
                assert exit_head.draft_vocab_ids is not None
                exit_head.draft_vocab_ids.copy_(draft_vocab_ids.sort().values)
            model.refresh_draft_vocab()
        return model

    @classmethod
    def from_configs(cls, base: PreTrainedModel, configs: Sequence[ExitHeadConfig]) -> "EarlyExitModel":
        """One head a config, copy-initialised; none is legal and leaves the base's own depth."""
        return cls(base, configs)

    @property
    def exit_heads(self) -> list[ExitHead]:
        """The heads, for type checkers: a ModuleList gives bare modules."""
        return [head for head in self.heads if isinstance(head, ExitHead)]

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """Number of decoder layers before each head, rising."""
        return tuple(head.config.exit_layer for head in self.exit_heads)

    def bind_heads(self) -> None:
        """Compute with the tensors that the heads have now: for when others were put in their places."""
        for head in self.exit_heads:
            head.bind()
        self._watched = list(self.parameters())
        self.refresh_draft_vocab()

    def refresh_draft_vocab(self) -> None:
        """Gather the LM head's rows anew after the heads' `draft_vocab_ids` or the base's tensors have moved."""
        self.backbone.follow_tensors()
        self._rows[:] = [
            None if head.draft_vocab_ids is None else self.backbone.lm_head_rows(head.draft_vocab_ids)
            for head in self.exit_heads
        ]
        if self.is_packed:
            self._pack()
        self.use_forms(self.forms)

    def follow_tensors(self) -> None:
        """Make the copies of weights anew, gathered or packed, where somebody has written to the base or the heads."""
        self.backbone.follow_tensors()
        state = self._tensor_state()
        if state != self._state:
            self.refresh_draft_vocab()
            self._state = state
            self.num_changes += 1

    def pack_weights(self) -> None:
        """On a CPU, keep packed copies of all weights, which makes passes over few rows twice as fast: see `Product`.

        The base itself is untouched; see `follow_tensors`. Rows that draft may be rounded: see `Product.pack`. On other
        devices, and in types that the machine has no packed product for, nothing happens.
        """
        self.follow_tensors()
        if not self.is_packed:  # not twice: somebody else may be reading the copies
            self._pack()

    def _pack(self) -> None:
        self.is_packed = True
        for product in self._own_products():
            product.pack()
        for rows in self._rows:
            if rows is not None:
                rows.pack(rounds=True)

    def products(self) -> Iterator[Product]:
        """All matrix products of base and heads where nothing is trained."""
        yield from self._own_products()
        yield from (rows for rows in self._rows if rows is not None)

    def use_forms(self, forms: FormTables) -> None:
        """Compute every product in these forms, see `measure_forms`, also when the weights have changed."""
        self.forms = forms
        for product in self.products():
            product.use_forms(forms)

    def _own_products(self) -> Iterator[Product]:
        yield from self.backbone.products()
        for head in self.exit_heads:
            yield from head.products()

    def row_invariant(self) -> "EarlyExitModel":
        """A model with the same base and heads whose `backbone` is row-invariant: see `Backbone.row_invariant`.

        The heads compute as ever. Pack weights before.
        """
        twin = copy.copy(self)
        twin.backbone = self.backbone.row_invariant()
        return twin

    def exit_logits(
        self,
        index: int,  # which head, counted from the shallowest
        state: Tensor,  # [..., D], from that head's forward
    ) -> Tensor:  # [..., V], or [..., V_d] in the order of the head's `draft_vocab_ids`
        """The logits of head `index`."""
        return self.backbone.logits(state, self._rows[index])

    def exit_step(self, index: int, state: StateRows) -> Native[Tensor] | None:
        """`exit_logits` as a step of our own kernels; None where these do not take it."""
        return self.backbone.logits_step(state, self._rows[index])

    def _tensor_state(self) -> list[TensorState]:
        return [tensor_state(parameter) for parameter in self._watched]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        result = super()._apply(fn, recurse)
        self.refresh_draft_vocab()
        return result


def _check_draft_vocab(token_ids: Tensor, vocab_size: int) -> None:
    if len(token_ids.unique()) < len(token_ids):
        raise ValueError("draft_vocab_ids name a token twice; each may stand once")
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"draft_vocab_ids hold an id outside 0 to {vocab_size - 1}")
