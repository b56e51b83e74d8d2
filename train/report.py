"""The report: the measured acceptance of an adapter as a table for the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_report(adapter: Path) -> str:
    """The table of an adapter's folder, from its `run.json`."""
    return describe_acceptance(json.loads((adapter / "run.json").read_text(encoding="utf-8"))["acceptance"])


def describe_acceptance(report: Mapping[str, Any]) -> str:
    """A column a hop: agreement and expected acceptance, overall, by distance to the last commit, by kind."""
    groups = {"all": report["hops"]}
    groups |= {f"distance {key}": hops for key, hops in report.get("by_distance", {}).items()}
    groups |= report["by_kind"]
    hops = list(report["hops"])
    lines = [f"held out, {report['num_tokens']} tokens: agreement / expected acceptance"]
    lines.append(" " * 16 + "".join(f"{hop:>18}" for hop in hops))
    for name, values in groups.items():
        cells = (f"{values[hop]['agreement']:.3f} / {values[hop]['acceptance']:.3f}" for hop in hops)
        lines.append(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
