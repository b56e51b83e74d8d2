"""Figures as SVG text: lines and grouped bars, readable without colour, on a white ground of their own.

Written by hand, because a report of a few small figures does not carry a plotting library.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 340
LEFT, TOP, BOTTOM = 64, 44, 52
LEGEND_WIDTH = 168
LEGEND_ROW = 20
# Okabe and Ito's colours, told apart by most eyes; dashes and marks serve the others.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b")
DASHES = ("", "7 4", "2 3")
BAR, GAP = 11, 12


class Line(NamedTuple):
    """One line of a figure."""

    name: str
    points: Sequence[tuple[float, float]]
    is_guide: bool = False
    """A thin grey line without marks, to compare the others with."""


def draw_lines(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,  # None takes 0 to the highest point
) -> str:
    """A figure of lines over a common axis."""
    points = [point for line in lines for point in line.points]
    x_range = (min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0))
    low, high = y_range or (0.0, max((y for _, y in points), default=1.0) * 1.05)
    height = max(HEIGHT, TOP + BOTTOM + LEGEND_ROW * len(lines))
    right, bottom = WIDTH - LEGEND_WIDTH, height - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / ((x_range[1] - x_range[0]) or 1)
        up = (y - low) / ((high - low) or 1)
        return LEFT + across * (right - LEFT), bottom - up * (bottom - TOP)

    parts = []
    for value in ticks(low, high):
        _, y = place(x_range[0], value)
        parts += [_rule(LEFT, y, right, y), _text(LEFT - 8, y + 4, shorten(value), "end")]
    for value in ticks(*x_range):
        x, _ = place(value, low)
        parts += [_rule(x, bottom, x, bottom + 5), _text(x, bottom + 19, shorten(value), "middle")]
    parts += [_rule(LEFT, bottom, right, bottom, "#333"), _text((LEFT + right) / 2, height - 12, x_label, "middle")]
    parts.append(_text(16, (TOP + bottom) / 2, y_label, "middle", turned=True))
    number = 0
    for row, line in enumerate(lines):
        colour = "#999" if line.is_guide else COLOURS[number % len(COLOURS)]
        dash = "4 4" if line.is_guide else DASHES[number // len(COLOURS) % len(DASHES)]
        number += not line.is_guide
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        style = f'stroke="{colour}" stroke-width="{1 if line.is_guide else 2}" stroke-dasharray="{dash or "none"}"'
        parts.append(f'<polyline points="{path}" fill="none" {style}/>')
        if not line.is_guide:
            parts += [_mark(*place(x, y), number, colour, f"{line.name}: {x:g}, {y:.4g}") for x, y in line.points]
        y = TOP + LEGEND_ROW * row + 8
        parts.append(f'<line x1="{right + 16}" y1="{y}" x2="{right + 40}" y2="{y}" {style}/>')
        if not line.is_guide:
            parts.append(_mark(right + 28, y, number, colour, line.name))
        parts.append(_text(right + 46, y + 4, line.name))
    return _svg(title, height, parts)


def draw_bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],  # by group, then by bar; the same bars in each group
    *,
    x_label: str,
    x_max: float = 1.0,
) -> str:
    """A figure of horizontal bars, side by side in each group."""
    names = list(next(iter(groups.values()), {}))
    group_height = BAR * len(names) + GAP
    height = TOP + BOTTOM + max(group_height * len(groups), LEGEND_ROW * len(names))
    left, right, bottom = 150, WIDTH - LEGEND_WIDTH, height - BOTTOM
    parts = []
    for value in ticks(0, x_max):
        x = left + value / x_max * (right - left)
        parts += [_rule(x, TOP, x, bottom), _text(x, bottom + 18, shorten(value), "middle")]
    parts.append(_text((left + right) / 2, height - 12, x_label, "middle"))
    for place, (group, values) in enumerate(groups.items()):
        y = TOP + group_height * place + GAP / 2
        shown = group if len(group) <= 20 else group[:19] + "…"
        parts.append(_text(left - 8, y + BAR * len(names) / 2 + 4, shown, "end"))
        for row, name in enumerate(names):
            length = min(values[name], x_max) / x_max * (right - left)
            parts.append(
                f'<rect x="{left}" y="{y + BAR * row:.1f}" width="{length:.1f}" height="{BAR - 1}" '
                f'fill="{COLOURS[row % len(COLOURS)]}">{_tip(f"{group}, {name}: {values[name]:.3f}")}</rect>'
            )
    for row, name in enumerate(names):
        y = TOP + LEGEND_ROW * row
        parts.append(f'<rect x="{right + 16}" y="{y}" width="14" height="14" fill="{COLOURS[row % len(COLOURS)]}"/>')
        parts.append(_text(right + 38, y + 12, name))
    return _svg(title, height, parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round values from `low` to `high`; the last ones may lie inside."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (power * factor) <= most - 1)
    return [
        round(step * count, 12) for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def shorten(value: float) -> str:
    """A number as an axis shows it: 1500000 is 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, -apple-system, Helvetica, Arial, sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    heading = f'<text x="16" y="24" font-size="15" font-weight="600" fill="#222">{_plain(title)}</text>'
    return "\n".join([head, _tip(title), ground, heading, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333"{turn}>{_plain(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _mark(x: float, y: float, number: int, colour: str, tip: str) -> str:
    """A dot, a square or a diamond."""
    if number % 3 == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{_tip(tip)}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if number % 3 == 0 else ""
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}"{turn}>{_tip(tip)}</rect>'


def _tip(text: str) -> str:
    return f"<title>{_plain(text)}</title>"


def _plain(text: str) -> str:
    # Names of kinds are the user's; XML takes no control characters.
    return escape("".join(letter for letter in text if letter.isprintable()))
