"""The report: what was trained and how good it is, as Markdown with figures and as a table for the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.markdown import escape
from . import sections
from .charts import draw_charts

HEADINGS = {
    "What was made": sections.making,
    "Training": sections.training_curve,
    "How often the exits are right": sections.acceptance,
    "How sure the exits are": sections.confidence,
    "Predicted acceptance length": sections.length,
}


def report_files(run: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `report.md` and of its `figures/*.svg`, by name; `run` is what `training_record` gave.

    All of it is drawn from `run`, so that a report can be made anew from the `run.json` of an adapter.
    """
    blocks = [f"# Report: exit heads of {escape(run['recipe']['name'])}", *sections.summary(run)]
    for heading, write in HEADINGS.items():
        blocks += [f"## {heading}", *write(run)]
    figures = {f"figures/{name}.svg": svg for name, svg in draw_charts(run).items()}
    return {"report.md": "\n\n".join(blocks) + "\n", **figures}


def describe_report(adapter: Path) -> str:
    """The table of an adapter's folder, from its `run.json`."""
    return describe_acceptance(json.loads((adapter / "run.json").read_text(encoding="utf-8"))["acceptance"])


def describe_acceptance(report: Mapping[str, Any]) -> str:
    """A column a hop: agreement and expected acceptance, overall, by distance to the last commit, by kind.

    With more than two exits the hops are those to the target and from each exit to the next.
    """
    groups = {"all": report["hops"]}
    groups |= {f"distance {key}": hops for key, hops in report.get("by_distance", {}).items()}
    groups |= report["by_kind"]
    hops = sections.main_hops(report["hops"])
    lines = [f"held out, {report['num_tokens']} tokens: agreement / expected acceptance"]
    lines.append(" " * 16 + "".join(f"{hop:>18}" for hop in hops))
    for name, values in groups.items():
        cells = (f"{values[hop]['agreement']:.3f} / {values[hop]['acceptance']:.3f}" for hop in hops)
        lines.append(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
