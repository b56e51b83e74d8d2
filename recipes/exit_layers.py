"""Exit layers as a recipe or a flag writes them: counts of decoder layers, or fractions of the depth."""

from collections.abc import Sequence
from fractions import Fraction

from ..heads import check_exit_layers


def parse_exit_layers(value: object) -> tuple[int | Fraction, ...]:
    """`[4, 8]`, `[1/8, 1/4]`, `"1/8,1/4"` or one layer alone; an int is a count, a Fraction a share of the depth.

    Raises ValueError for what is neither; whether a count exists in the base is checked by `resolve_exit_layers`.
    """
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(_parse_one(item) for item in items)


def check_written(exit_layers: Sequence[int | Fraction]) -> None:
    """Raise ValueError for layers that no depth makes distinct and rising."""
    counts = tuple(layer for layer in exit_layers if isinstance(layer, int))
    fractions = [layer for layer in exit_layers if isinstance(layer, Fraction)]
    if counts or not fractions:
        check_exit_layers(counts, max((*counts, 0)) + 1)
    if sorted(set(fractions)) != fractions:
        raise ValueError(
            f"exit layers {show_exit_layers(exit_layers)} are not in rising order; write each once, rising"
        )


def resolve_exit_layers(exit_layers: Sequence[int | Fraction] | None, num_layers: int) -> tuple[int, ...]:
    """The layers as counts of a base of `num_layers`; None takes `default_exit_layers`.

    A fraction becomes the nearest count, at least 1. Raises ValueError unless they are distinct, rising and below
    the depth.
    """
    if exit_layers is None:
        return default_exit_layers(num_layers)
    counts = tuple(layer if isinstance(layer, int) else max(1, round(layer * num_layers)) for layer in exit_layers)
    try:
        check_exit_layers(counts, num_layers)
    except ValueError as error:
        if counts == tuple(exit_layers):
            raise
        written, shown = show_exit_layers(exit_layers), show_exit_layers(counts)
        raise ValueError(
            f"exit layers {written} are {shown} of the base's {num_layers} layers: {error}; write counts"
        ) from None
    return counts


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """About 1/8 and 1/4 of the depth, each at least one layer; one exit where the base has two layers."""
    if num_layers < 2:
        raise ValueError(f"the base has {num_layers} layer: there is no layer to exit at; choose a deeper base")
    draft = max(1, round(num_layers / 8))
    intermediate = max(draft + 1, round(num_layers / 4))
    return (draft, intermediate) if intermediate < num_layers else (draft,)


def show_exit_layers(exit_layers: Sequence[int | Fraction]) -> str:
    """`4,8` or `1/8,1/4`, as a flag takes them."""
    return ",".join(map(str, exit_layers))


def _parse_one(item: object) -> int | Fraction:
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    try:
        if isinstance(item, str) and item.strip().lstrip("-").isdecimal():
            return int(item)
        fraction = Fraction(str(item).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if isinstance(item, bool) or not 0 < fraction < 1:
        raise ValueError(f"{item!r} is no layer; write counts such as [4, 8], or fractions of the depth: [1/8, 1/4]")
    return fraction
