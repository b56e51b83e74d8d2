"""The figures of a benchmark, drawn from its result."""

from collections.abc import Sequence

from ..checkpoints.figure import Line, draw_bars, draw_lines
from .bench_schema import Cell, Result
from .bench_summary import ALL
from .levels import NGRAM_LEVEL


def draw_bench_charts(result: Result) -> dict[str, str]:
    """SVG texts by name: `speedup`, `stages` and `positions` as far as there is anything to draw, and `batch` where
    there are several batch sizes. All but `batch` are of the smallest batch and the first temperature."""
    cells = [cell for cell in result["cells"] if cell["num_calls"]]
    first = [
        cell
        for cell in cells
        if cell["batch_size"] == result["cells"][0]["batch_size"]
        and cell["temperature"] == result["cells"][0]["temperature"]
    ]
    charts = {"speedup": _speedup(first), "stages": _stages(first), "positions": _positions(first)}
    if len({cell["batch_size"] for cell in cells}) > 1:
        charts["batch"] = _batch([cell for cell in cells if cell["temperature"] == first[0]["temperature"]])
    return {name: chart for name, chart in charts.items() if chart is not None}


def overall(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of all sets together, or of the only set."""
    return [cell for cell in cells if cell["set"] == ALL] or list(cells)


def _speedup(cells: Sequence[Cell]) -> str | None:
    ratios = {(cell["set"], cell["method"]): cell["ratio"]["mean"] for cell in cells if cell["ratio"]}
    if not ratios:
        return None
    methods = list(dict.fromkeys(method for _, method in ratios))
    groups = {
        name: {method: ratios.get((name, method), 0.0) for method in methods}
        for name in dict.fromkeys(name for name, _ in ratios)
    }
    return draw_bars(
        f"Speed-up over generate by set, batch {cells[0]['batch_size']}",
        groups,
        x_label="times the tokens a second of generate",
        x_max=max(ratios.values()) * 1.05,
    )


def _batch(cells: Sequence[Cell]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in overall(cells):
        if cell["ratio"]:
            lines.setdefault(cell["method"], []).append((float(cell["batch_size"]), cell["ratio"]["mean"]))
    return draw_lines(
        "Speed-up over generate by batch size",
        [Line(method, sorted(points)) for method, points in lines.items()],
        x_label="prompts side by side",
        y_label="times generate",
    )


def _stages(cells: Sequence[Cell]) -> str | None:
    shares = {cell["method"]: cell["time_shares"] for cell in overall(cells) if cell["time_shares"]}
    if not shares:
        return None
    names = [
        name
        for name in ("prefill", NGRAM_LEVEL, "draft", "intermediate", "target", "other")
        if any(name in parts for parts in shares.values())
    ]
    groups = {method: {name: max(0.0, parts.get(name, 0.0)) for name in names} for method, parts in shares.items()}
    return draw_bars("Where the time goes", groups, x_label="share of the time")


def _positions(cells: Sequence[Cell]) -> str | None:
    lines = [
        Line(f"{cell['method']}, {name}", list(enumerate(level["accepted_per_position"], 1)))
        for cell in overall(cells)
        for name, level in (cell["levels"] or {}).items()
        if level["accepted_per_position"]
    ]
    if not lines:
        return None
    return draw_lines(
        "Kept by position in the draft",
        lines,
        x_label="place of a token in what a level is asked to verify",
        y_label="share kept",
        y_range=(0.0, 1.0),
    )
