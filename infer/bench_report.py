"""A benchmark's result for readers: Markdown with figures, and a table for the terminal."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from ..checkpoints.markdown import escape, figure, prose, table
from .bench_charts import draw_bench_charts
from .bench_schema import Cell, Result, Spread
from .bench_summary import ALL, failures
from .methods import METHODS

FIGURES = {
    "speedup": "tokens a second over those of generate, by set and method",
    "batch": "tokens a second over those of generate, by batch size",
    "stages": "share of the time by stage, for each of our methods",
    "positions": "share of drafted tokens kept, by their place in the draft",
}
SPEED_HEADER = (
    *("method", "tokens/s", "x generate", "middle half", "ms/token", "ms to first"),
    *("own text", "own tokens", "kept", "length"),
)


def bench_files(result: Result) -> dict[str, str]:
    """The texts of `report.md` and of its `figures/*.svg`, by name."""
    charts = draw_bench_charts(result)
    blocks = [f"# Benchmark: {escape(result['benchmark']['model'])}", *_summary(result)]
    blocks += [figure(name, FIGURES[name]) for name in FIGURES if name in charts]
    blocks += ["## Speed, and whether the text is the model's own", *_speed(result["cells"])]
    blocks += ["## Levels", *_levels(result["cells"])]
    blocks += ["## Memory", *_memory(result)]
    blocks += ["## What was run", *_made(result)]
    return {"report.md": "\n\n".join(blocks) + "\n"} | {f"figures/{name}.svg": svg for name, svg in charts.items()}


def describe_cells(cells: Sequence[Cell]) -> str:
    """The speed table of each set, batch size and temperature, for the terminal."""
    lines = []
    for heading, group in _groups(cells):
        rows = [SPEED_HEADER, *(speed_row(cell) for cell in group if cell["num_calls"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", heading]
        for name, *values in rows:
            padded = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
            lines.append("  ".join(["  " + name.ljust(widths[0]), *padded]))
        lines += [f"    {cell['method']} refused: {cell['refused']}" for cell in group if cell["refused"]]
    return "\n".join(lines[1:])


def describe_failures(result: Result) -> str | None:
    """One loud line for each method whose text was not the model's own; None where there is none."""
    lines = []
    for cell in failures(result["cells"]):
        check = cell["check"]
        assert check is not None
        how = f"up to {_gap(check['largest_gap'])} behind the model's own choice (bound: {result['max_gap']:.3g})"
        if check["largest_gap"] is None:
            how = "with a token that the model could not have chosen"
        lines.append(
            f"NOT LOSSLESS: {cell['method']} on {cell['set']}, batch {cell['batch_size']}, temperature "
            f"{cell['temperature']:g}: {check['num_texts'] - check['num_equal']} of {check['num_texts']} texts differ "
            f"from the model's own, {how}"
        )
    return "\n".join(lines) or None


def speed_row(cell: Cell) -> tuple[str, ...]:
    """A cell's line of the speed table."""
    ratio, levels = cell["ratio"], cell["levels"]
    target = levels["target"] if levels else None
    return (
        cell["method"] + (" (failed on some)" if cell["refused"] else ""),
        _number(cell["tokens_per_second"], ".1f"),
        f"{ratio['mean']:.2f}" if ratio else "",
        f"{ratio['q1']:.2f}–{ratio['q3']:.2f}" if ratio else "",
        _number(cell["seconds_per_token"], ".1f", 1000),
        _number(cell["seconds_to_first_token"], ".0f", 1000),
        _own_text(cell),
        "" if cell["check"] is None else f"{cell['check']['share_chosen']:.1%}",
        "" if target is None or target["acceptance_rate"] is None else f"{target['acceptance_rate']:.0%}",
        "" if target is None or target["acceptance_length"] is None else f"{target['acceptance_length']:.2f}",
    )


def _own_text(cell: Cell) -> str:
    check = cell["check"]
    if check is None:
        return "not asked"
    text = f"{check['num_equal']} of {check['num_texts']}"
    if check["num_equal"] < check["num_texts"]:
        if METHODS[cell["method"]].promise == "lossy":
            return f"{text}, LOSSY"
        text += ", near ties" if check["is_lossless"] else f", NOT ({_gap(check['largest_gap'])})"
    return text


def _gap(gap: float | None) -> str:
    return "never" if gap is None else f"{gap:.3g}"


def _number(values: Spread | None, form: str, factor: float = 1) -> str:
    return "" if values is None else format(values["median"] * factor, form)


def _groups(cells: Sequence[Cell]) -> Iterable[tuple[str, list[Cell]]]:
    for (name, temperature, batch_size), together in groupby(
        cells, key=lambda cell: (cell["set"], cell["temperature"], cell["batch_size"])
    ):
        sampled = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        kind = "all sets" if name == ALL else name
        group = list(together)
        num_calls = max(cell["num_calls"] for cell in group)
        yield f"{kind}, {sampled}, batch {batch_size}: medians of {num_calls} call{'s' * (num_calls != 1)}", group


def _summary(result: Result) -> list[str]:
    about = """
        Every prompt by every method in turn, in one process; ratios are taken call by call to transformers' own
        `generate` on the same prompt (or batch) in the same round, and their geometric mean is told. `own text` counts
        answers that are token-identical to the greedy `generate` of the prompt alone, or, sampled, to our plain
        decoding with the same seed; `own tokens` is the share of tokens that the model itself would choose behind all
        that stands before them.
        """
    verdict = f"**{escape(loud)}**" if (loud := describe_failures(result)) else _verdict(result)
    blocks = [verdict, *_lossy(result), prose(about)]
    if not result["is_complete"]:
        blocks.append("The time limit came before the last round; what is here was measured whole.")
    return blocks


def _lossy(result: Result) -> list[str]:
    """What is said of methods that do not promise the model's own text."""
    names = [escape(name) for name, method in result["methods"].items() if method["promise"] == "lossy"]
    if not names:
        return []
    return [f"**Lossy: {', '.join(names)}.** Texts are not the model's own; hold the speed against `own tokens`."]


def _verdict(result: Result) -> str:
    if result["benchmark"]["dtype"] == "float32":
        return "Every text of every method that promises to be lossless is token-identical to the model's own."
    return prose(
        f"""Every text of every method that promises to be lossless is the model's own: equal, or never more than
        {result["max_gap"]:.3g} of a logit from the model's own choice, which is within the precision of
        {result["benchmark"]["dtype"]}."""
    )


def _speed(cells: Sequence[Cell]) -> list[str]:
    blocks = []
    for heading, group in _groups(cells):
        answered = [cell for cell in group if cell["num_calls"]]
        blocks += [f"### {escape(heading)}", table(SPEED_HEADER, map(speed_row, answered))]
        refusals = [f"- {escape(c['method'])}: {escape(str(c['refused']))}" for c in group if c["refused"]]
        blocks += ["Refused:\n\n" + "\n".join(refusals)] if refusals else []
    return blocks


def _levels(cells: Sequence[Cell]) -> list[str]:
    header = ("method", "level", "kept", "length", "kept by position", "time", "time of a verification / of a draft")
    blocks = []
    for heading, group in _groups(cells):
        ours = [cell for cell in group if cell["levels"] and "draft" in cell["levels"]]
        rows = [row for cell in ours for row in _level_rows(cell)]
        blocks += [f"### {escape(heading)}", table(header, rows)] if rows else []
        passes = [
            f"- {escape(cell['method'])}: {cell['layers_per_token']:.1f} layers a token, "
            f"{cell['wasted_layers_per_token']:.1f} of them on tokens that were turned down or in heads; "
            f"{_share(cell, 'prefill')} of the time is prefill, {_share(cell, 'other')} none of the stages."
            for cell in ours
            if cell["layers_per_token"] is not None and cell["wasted_layers_per_token"] is not None
        ]
        passes += [
            f"- {escape(cell['method'])}: of {cell['skipped_share']:.0%} of the tokens the model was never asked."
            for cell in ours
            if cell["skipped_share"]
        ]
        blocks += ["\n".join(passes)] if passes else []
    return blocks or ["No method with several levels was run."]


def _level_rows(cell: Cell) -> Iterable[tuple[str, ...]]:
    for name, level in (cell["levels"] or {}).items():
        ratio = (cell["verification_to_draft_time"] or {}).get(name)
        yield (
            cell["method"],
            name,
            "" if level["acceptance_rate"] is None else f"{level['acceptance_rate']:.1%}",
            "" if level["acceptance_length"] is None else f"{level['acceptance_length']:.2f}",
            " ".join(f"{kept:.0%}" for kept in level["accepted_per_position"]),
            _share(cell, name),
            "" if ratio is None else f"{ratio:.1f}",
        )


def _share(cell: Cell, name: str) -> str:
    return "" if cell["time_shares"] is None else f"{cell['time_shares'][name]:.0%}"


def _memory(result: Result) -> list[str]:
    base = f"The base's weights take {result['base_bytes'] / 1e6:,.1f} MB"
    rows = []
    for name, method in result["methods"].items():
        for level, added in (method["added_bytes"] or {}).items():
            parts = [f"{added[part] / 1e6:,.2f}" for part in ("weights", "kv_cache", "hidden_states")]
            rows.append((name, level, *parts, f"{sum(added.values()) / result['base_bytes']:.1%}"))
    header = ("method", "level", "weights, MB", "KV cache, MB", "hidden states, MB", "of the base")
    blocks = [f"{base}. What levels add, computed from shapes:", table(header, rows)] if rows else [f"{base}."]
    peaks: dict[str, int] = {}
    for cell in result["cells"]:
        if cell["peak_bytes"] is not None:
            peaks[cell["method"]] = max(cell["peak_bytes"], peaks.get(cell["method"], 0))
    if peaks:
        kind = {
            "device": "torch had at most so much of the GPU's memory in use, all methods loaded:",
            "process": "The whole process, all methods loaded, had at most so much memory resident, an upper bound:",
        }[result["memory_kind"] or "process"]
        blocks += [kind, table(("method", "MB"), ((name, f"{peak / 1e6:,.0f}") for name, peak in peaks.items()))]
    return blocks


def _made(result: Result) -> list[str]:
    settings = {name: value for name, value in result["benchmark"].items() if name not in ("versions", "sets")}
    lines = [f"- {escape(name)}: {escape(str(value))}" for name, value in settings.items()]
    versions = ", ".join(f"{name} {number}" for name, number in result["benchmark"]["versions"].items())
    sets = ", ".join(f"{name} ({about['num_prompts']} prompts)" for name, about in result["benchmark"]["sets"].items())
    methods = [
        f"- {escape(name)} ({method['promise']}): {method['about']}" for name, method in result["methods"].items()
    ]
    return ["\n".join(methods), "\n".join([f"- sets: {escape(sets)}", *lines, f"- versions: {escape(versions)}"])]
