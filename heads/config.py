"""What an exit head is made of."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

HeadKind = Literal["shared", "norm", "mlp", "block", "lora"]
DEFAULT_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class ExitHeadConfig:
    """One exit head; raises ValueError where its values cannot go together."""

    exit_layer: int
    """Number of decoder layers run before the head; 0 is the token's embedding alone."""
    kind: HeadKind = "block"
    """`shared`: the base's own final norm; `norm`: an own norm; `mlp`: a residual MLP; `block`: a decoder layer;
    `lora`: the base's own next decoder layer, its weights shared, plus low-rank deltas."""
    committed_context: bool = False
    """Whether the base's final hidden state of the newest committed token is a second input."""
    draft_vocab_size: int | None = None
    """Number of token ids that the head scores; None scores the whole vocabulary."""
    lora_rank: int | None = None
    """Rank of the deltas of a `lora` head, 16 unless given; None for all others."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadKind):
            raise ValueError(f"head kind {self.kind!r} is unknown; choose one of {', '.join(get_args(HeadKind))}")
        if self.exit_layer == 0 and not self.committed_context:
            raise ValueError("exit layer 0 needs a head with committed context; turn it on or choose a layer >= 1")
        if self.kind == "shared" and self.committed_context:
            raise ValueError("a 'shared' head has no weights to take a committed context; choose another kind")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; it must be at least 1")
        if self.kind == "lora" and self.lora_rank is None:
            object.__setattr__(self, "lora_rank", DEFAULT_LORA_RANK)
        if self.kind != "lora" and self.lora_rank is not None:
            raise ValueError(f"lora_rank is given for a head of kind {self.kind!r}; it goes with kind 'lora' only")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank is {self.lora_rank}; it must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON-ready values."""
        values = asdict(self)
        if self.lora_rank is None:
            del values["lora_rank"]  # as in the files from before there were such heads
        return values


def head_kinds(kinds: HeadKind | Sequence[HeadKind], num_exits: int) -> tuple[HeadKind, ...]:
    """One kind for each exit; raises ValueError where a list of them is not as long as the exits."""
    if isinstance(kinds, str):
        return (kinds,) * num_exits
    if len(kinds) != num_exits:
        raise ValueError(
            f"{len(kinds)} head kinds ({','.join(kinds)}) are given for {num_exits} exit layers; "
            "give one for each, or a single one for all"
        )
    return tuple(kinds)


def check_exit_layers(exit_layers: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError unless `0 <= exit_layers[0] < exit_layers[1] < ... < num_layers`."""
    shown = ",".join(map(str, exit_layers))
    if not exit_layers:
        raise ValueError("no exit layers are given; name at least one, for example 4,8")
    for exit_layer in exit_layers:
        if not 0 <= exit_layer < num_layers:
            raise ValueError(
                f"exit layer {exit_layer} is out of range: the base has {num_layers} layers, so 0 to {num_layers - 1}"
            )
    if len(set(exit_layers)) < len(exit_layers):
        raise ValueError(f"exit layers {shown} name a layer twice; each may stand once")
    if list(exit_layers) != sorted(exit_layers):
        raise ValueError(
            f"exit layers {shown} are not in rising order; write {','.join(map(str, sorted(exit_layers)))}"
        )
