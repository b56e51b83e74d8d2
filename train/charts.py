"""The figures of a report, drawn from the run's record."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints.figure import Line, draw_bars, draw_lines
from .evaluate import TARGET


def draw_charts(run: Mapping[str, Any]) -> dict[str, str]:
    """SVG texts by name, `loss` and `agreement` only where something was trained; `run` is a `training_record`."""
    charts: dict[str, str] = {}
    if run["curve"]:
        charts |= {"loss": _loss(run["curve"]), "agreement": _agreement(run["curve"])}
    return charts | {
        "position": _position(run["acceptance"]),
        "kinds": _kinds(run["acceptance"]),
        "confidence": _confidence(run["acceptance"]),
        "length": _length(run["predicted_length"]),
    }


def describe_hop(hop: str) -> str:
    """ "4->target" as a reader says it."""
    return hop.replace("->", " → ")


def _loss(curve: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for record in curve for name in record["loss"]))
    lines = [
        Line(f"exit {name}", [(r["num_tokens"], r["loss"][name]) for r in curve if name in r["loss"]]) for name in names
    ]
    return draw_lines("Training loss", lines, x_label="response tokens seen", y_label="mean loss of a token")


def _agreement(curve: Sequence[Mapping[str, Any]]) -> str:
    hops = [key for key in curve[-1] if "->" in key]
    lines = [
        Line(describe_hop(hop), [(record["num_tokens"], record[hop]["agreement"]) for record in curve]) for hop in hops
    ]
    return draw_lines(
        "Agreement on held-out responses while training",
        lines,
        x_label="response tokens seen",
        y_label="agreement",
        y_range=(0.0, 1.0),
    )


def _position(acceptance: Mapping[str, Any]) -> str:
    by_distance = acceptance["by_distance"]
    lines = [
        Line(describe_hop(hop), [(float(distance), hops[hop]["agreement"]) for distance, hops in by_distance.items()])
        for hop in acceptance["hops"]
    ]
    return draw_lines(
        "Agreement by position in the draft",
        lines,
        x_label="tokens since the last committed one",
        y_label="agreement",
        y_range=(0.0, 1.0),
    )


def _kinds(acceptance: Mapping[str, Any]) -> str:
    groups = {
        kind: {describe_hop(hop): hops[hop]["agreement"] for hop in hops if hop.endswith(f">{TARGET}")}
        for kind, hops in acceptance["by_kind"].items()
    }
    return draw_bars("Agreement with the target by kind of data", groups, x_label="agreement")


def _confidence(acceptance: Mapping[str, Any]) -> str:
    lines = [
        Line(f"exit {name}", [(entry["confidence"], entry["agreement"]) for entry in entries])
        for name, entries in acceptance["calibration"].items()
    ]
    return draw_lines(
        "How far an exit's confidence can be trusted",
        [*lines, Line("as sure as right", [(0.0, 0.0), (1.0, 1.0)], is_guide=True)],
        x_label="probability of its most likely token",
        y_label="share that the target agrees with",
        y_range=(0.0, 1.0),
    )


def _length(predicted: Mapping[str, Any]) -> str:
    lines = [
        Line(f"{method} {describe_hop(exits)}", list(enumerate(lengths["greedy"], 1)))
        for method in ("single-layer", "hispec")
        for exits, lengths in predicted[method].items()
    ]
    return draw_lines(
        "Predicted acceptance length, greedy",
        lines,
        x_label="num_draft_tokens",
        y_label="tokens per verification",
    )
