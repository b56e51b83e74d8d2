"""Costs on paper: what a model of given shapes would take on a device of given figures. Pure functions.

A roofline: a pass over T rows takes the longer of reading its bytes (weights once, keys and values of every sequence)
and doing its floating-point operations (two for each weight and row), and the launch of its kernels on top. Kernels
reach a part of a device's figures, so `Device` takes the figures that they reach.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields

from .cost_model import Acceptance, Costs, Overhead, Table

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
NUM_ROWS = (1, 2, 3, 5, 9, 17)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a machine reaches on matrix products."""

    bandwidth: float
    """Bytes a second from memory."""
    flops: float
    """Floating-point operations a second in the model's dtype."""
    launch: float
    """Seconds that starting the kernels of one layer takes, when nothing hides them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and not (field.name == "launch" and value == 0):
                raise ValueError(f"a device's {field.name} is {value}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder whose layers are attention and a gated MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_weight: float = 2.0

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def kv_values(self) -> int:
        """Values that one token leaves in the cache of one layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Head:
    """An exit head on paper."""

    exit_layer: int
    kind: str = "block"
    """As in `ExitHeadConfig`."""
    draft_vocab_size: int | None = None
    """None scores the whole vocabulary."""
    committed_context: bool = True


DEVICES: Mapping[str, Device] = {
    "h100": Device(bandwidth=3.35e12 * 0.8, flops=989e12 * 0.6, launch=25e-6),
    "a100": Device(bandwidth=2.0e12 * 0.8, flops=312e12 * 0.6, launch=30e-6),
    "rtx4090": Device(bandwidth=1.0e12 * 0.8, flops=165e12 * 0.6, launch=30e-6),
    "cpu": Device(bandwidth=60e9, flops=1e12, launch=200e-6),
}
"""16-bit figures from the vendors' data sheets, of which kernels reach about 0.8 (bandwidth) and 0.6 (operations);
launches as eager PyTorch makes them, about ten kernels a layer. `cpu` is a desktop with two memory channels."""

SHAPES: Mapping[str, Shape] = {
    name: Shape(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
    )
    for name, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary in (
        ("smollm2", 30, 576, 1536, 9, 3, 64, 49152),
        ("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        ("llama2-70b", 80, 8192, 28672, 64, 8, 128, 32000),
        ("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        ("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        ("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
    )
}
"""16-bit, from the models' published configs."""


def parse_device(text: str) -> Device:
    """A name of `DEVICES`, or `bandwidth=BYTES/S,flops=FLOP/S,launch=SECONDS`; ValueError for anything else."""
    if text in DEVICES:
        return DEVICES[text]
    try:
        values = {name: float(value) for name, value in (part.split("=") for part in text.split(","))}
        return Device(**values)
    except TypeError:
        pass
    except ValueError as error:
        if str(error).startswith("a device"):
            raise
    raise ValueError(
        f"the device {text!r} is neither {', '.join(DEVICES)} nor figures such as "
        "bandwidth=2e12,flops=3e14,launch=2e-5 (bytes/s, FLOP/s, seconds a layer)"
    )


def costs_on_paper(shape: Shape, device: Device, heads: Items[Head], *, context: int = 512) -> Costs:
    """Costs of a model with these heads, behind `context` tokens of each sequence."""

    def table(weights: float, layers: float, kv_values: float) -> Table:
        def seconds(batch: int, rows: int) -> float:
            num_bytes = shape.bytes_per_weight * (weights + kv_values * batch * context)
            # Scores and their sums: two operations for each head, row, key and number.
            attention = 4 * (shape.num_heads * shape.head_dim * context if kv_values else 0)
            operations = batch * rows * (2 * weights + attention)
            return max(num_bytes / device.bandwidth, operations / device.flops) + layers * device.launch

        return Table(
            batch_sizes=BATCH_SIZES,
            num_rows=NUM_ROWS,
            seconds=tuple(tuple(seconds(batch, rows) for rows in NUM_ROWS) for batch in BATCH_SIZES),
        )

    def exit_head(head: Head) -> Table:
        scored = shape.hidden_size * (head.draft_vocab_size or shape.vocab_size)
        fuse = 2 * shape.hidden_size**2 * head.committed_context
        body = {"block": shape.layer_weights, "mlp": shape.hidden_size**2}.get(head.kind, 0)
        is_block = head.kind == "block"
        return table(scored + fuse + body, 1.5 if is_block else 0.5, shape.kv_values if is_block else 0)

    return Costs(
        num_layers=shape.num_layers,
        layer=table(shape.layer_weights, 1, shape.kv_values),
        target_head=table(shape.hidden_size * shape.vocab_size, 0.2, 0),
        exit_heads={head.exit_layer: exit_head(head) for head in heads},
        per_draw=Overhead(fixed=device.launch),
        per_middle=Overhead(fixed=2 * device.launch),
        per_round=Overhead(fixed=4 * device.launch),
    )


def acceptance_on_paper(exit_layers: Items[int], num_layers: int, rates: Items[float]) -> Acceptance:
    """From one rate a hop, the same at every place: draft to target for one exit; for two exits draft to
    intermediate, intermediate to target, and draft to target, by default their product."""
    for rate in rates:
        if not 0 <= rate <= 1:
            raise ValueError(f"an acceptance rate is {rate}; it must lie between 0 and 1")
    counts = {1: (1,), 2: (2, 3)}.get(len(exit_layers), ())
    if len(rates) not in counts:
        raise ValueError(
            f"{len(rates)} acceptance rates are given for {len(exit_layers)} exits; give draft->target for one exit, "
            "and draft->intermediate,intermediate->target[,draft->target] for two"
        )
    if len(exit_layers) == 1:
        return Acceptance(hops={(exit_layers[0], num_layers): (rates[0],)})
    draft, middle = exit_layers
    direct = rates[2] if len(rates) == 3 else rates[0] * rates[1]
    return Acceptance(
        hops={(draft, middle): (rates[0],), (middle, num_layers): (rates[1],), (draft, num_layers): (direct,)}
    )
