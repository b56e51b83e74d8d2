"""From the records of a benchmark to its cells. Records in, numbers out."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .bench_schema import Cell, Check, LevelResult, Ratio, Spread
from .levels import NGRAM_LEVEL
from .methods import BASELINE, METHODS, PLAIN

ALL = "all"
"""The name of all sets together."""
Records = Sequence[Mapping[str, Any]]


def summarise(records: Records, num_layers: int) -> list[Cell]:
    """A cell for each set (and all together, where there are several), temperature, batch size and method."""
    by_cell: dict[tuple[str, float, int, str], list[Mapping[str, Any]]] = {}
    rates: dict[tuple[Any, ...], float] = {}
    several = len({record["set"] for record in records}) > 1
    for record in records:
        place = (record["temperature"], record["batch_size"], record["method"])
        for name in (record["set"], ALL) if several else (record["set"],):
            by_cell.setdefault((name, *place), []).append(record)
        if record["error"] is None:
            rates[_call_key(record, record["method"])] = rate(record)
    sets = list(dict.fromkeys(key[0] for key in by_cell))
    methods = list(dict.fromkeys(key[3] for key in by_cell))
    # All sets together first, then each, by temperature and batch size, the methods side by side.
    ordered = sorted(by_cell, key=lambda key: (key[0] != ALL, sets.index(key[0]), *key[1:3], methods.index(key[3])))
    return [_cell(key, by_cell[key], rates, num_layers) for key in ordered]


def is_lossless(cells: Iterable[Cell]) -> bool:
    """Whether all texts of methods that promise it are the model's own."""
    return not failures(cells)


def failures(cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose method promises to be lossless and was not."""
    return [
        cell
        for cell in cells
        if METHODS[cell["method"]].promise == "lossless" and cell["check"] and not cell["check"]["is_lossless"]
    ]


def rate(record: Mapping[str, Any]) -> float:
    """New tokens a second of one call."""
    return float(sum(map(len, record["token_ids"])) / record["seconds"])


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles; None of nothing."""
    if not values:
        return None
    low, middle, high = _quartiles(values)
    return {"median": middle, "q1": low, "q3": high, "num_values": len(values)}


def ratio(values: Sequence[float]) -> Ratio | None:
    """Geometric mean and quartiles; None of nothing."""
    if not values:
        return None
    low, _, high = _quartiles(values)
    return {"mean": statistics.geometric_mean(values), "q1": low, "q3": high, "num_values": len(values)}


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _cell(
    key: tuple[str, float, int, str], records: Records, rates: Mapping[tuple[Any, ...], float], num_layers: int
) -> Cell:
    answered = [record for record in records if record["error"] is None]
    refused = next((str(record["error"]) for record in records if record["error"] is not None), None)
    with_stats = [record for record in answered if record["stats"] is not None]
    levels = _levels([record["stats"] for record in with_stats]) if with_stats else None
    layers = _layers_per_token([record["stats"] for record in with_stats])
    peaks = [record["peak_bytes"] for record in answered if record["peak_bytes"] is not None]

    def ratio_to(other: str) -> Ratio | None:
        pairs = [(rates[_call_key(r, r["method"])], rates.get(_call_key(r, other))) for r in answered]
        return ratio([mine / theirs for mine, theirs in pairs if theirs is not None])

    def of_each(measure: Callable[[Mapping[str, Any]], float | None]) -> Spread | None:
        return spread([value for record in answered if (value := measure(record)) is not None])

    return {
        "set": key[0],
        "temperature": key[1],
        "batch_size": key[2],
        "method": key[3],
        # One that failed on a few prompts is told beside its numbers for the others.
        "refused": refused,
        "num_calls": len(answered),
        "num_new_tokens": sum(len(ids) for record in answered for ids in record["token_ids"]),
        "tokens_per_second": of_each(rate),
        "ratio": ratio_to(BASELINE),
        "ratio_to_autoregressive": ratio_to(PLAIN),
        "seconds_per_token": of_each(_seconds_per_token),
        "seconds_to_first_token": of_each(lambda record: statistics.mean(record["first_seconds"])),
        "levels": levels,
        "time_shares": _time_shares(with_stats),
        "verification_to_draft_time": _verification_to_draft(levels),
        "layers_per_token": layers,
        "wasted_layers_per_token": None if layers is None else layers - num_layers,
        "skipped_share": _skipped_share([record["stats"] for record in with_stats]),
        "peak_bytes": max(peaks, default=None),
        "check": _check(answered),
    }


def _call_key(record: Mapping[str, Any], method: str) -> tuple[Any, ...]:
    return (*(record[name] for name in ("set", "temperature", "batch_size", "repeat", "group")), method)


def _seconds_per_token(record: Mapping[str, Any]) -> float | None:
    longest = max(map(len, record["token_ids"]))
    return (record["seconds"] - min(record["first_seconds"])) / (longest - 1) if longest > 1 else None


def _levels(all_stats: Records) -> dict[str, LevelResult]:
    return {name: _level([stats["levels"][name] for stats in all_stats]) for name in all_stats[0]["levels"]}


def _level(counts: Records) -> LevelResult:
    def total(name: str) -> Any:
        return sum(count[name] for count in counts)

    kept, drafted = (_add_up(count[f"{what}_per_position"] for count in counts) for what in ("accepted", "drafted"))
    num_rounds, num_drafted, num_accepted = total("num_rounds"), total("num_drafted"), total("num_accepted")
    is_verifier = num_drafted > 0
    return {
        "num_rounds": num_rounds,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "acceptance_rate": num_accepted / num_drafted if is_verifier else None,
        "acceptance_length": num_accepted / num_rounds + 1 if is_verifier else None,
        "accepted_per_position": [
            (kept[place] if place < len(kept) else 0) / number for place, number in enumerate(drafted)
        ],
        "num_layer_passes": total("num_layer_passes"),
        "seconds": total("seconds"),
    }


def _add_up(lists: Iterable[list[int]]) -> list[int]:
    total: list[int] = []
    for numbers in lists:
        total += [0] * (len(numbers) - len(total))
        for place, number in enumerate(numbers):
            total[place] += number
    return total


def _layers_per_token(all_stats: Records) -> float | None:
    # The first token of each answer comes from the prefill.
    num_tokens = sum(stats["num_committed"] - stats["num_prefills"] for stats in all_stats)
    passes = sum(level["num_layer_passes"] for stats in all_stats for level in stats["levels"].values())
    return passes / num_tokens if num_tokens else None


def _skipped_share(all_stats: Records) -> float | None:
    num_tokens = sum(stats["num_committed"] - stats["num_prefills"] for stats in all_stats)
    return sum(stats["num_skipped"] for stats in all_stats) / num_tokens if num_tokens else None


def _time_shares(records: Records) -> dict[str, float] | None:
    seconds = sum(record["seconds"] for record in records)
    if not seconds:
        return None
    parts = {"prefill": sum(record["stats"]["prefill_seconds"] for record in records)}
    for name in records[0]["stats"]["levels"]:
        parts[name] = sum(record["stats"]["levels"][name]["seconds"] for record in records)
    shares = {name: part / seconds for name, part in parts.items()}
    return shares | {"other": 1 - sum(shares.values())}


def _verification_to_draft(levels: Mapping[str, LevelResult] | None) -> dict[str, float] | None:
    draft = (levels or {}).get("draft")
    if levels is None or draft is None or not draft["seconds"] or not draft["num_rounds"]:
        return None
    seconds_per_draft = draft["seconds"] / draft["num_rounds"]
    return {
        name: level["seconds"] / level["num_rounds"] / seconds_per_draft
        for name, level in levels.items()
        if name not in ("draft", NGRAM_LEVEL) and level["num_rounds"]
    }


def _check(records: Records) -> Check | None:
    checked = [record for record in records if record["check"] is not None]
    if not checked:
        return None
    checks = [record["check"] for record in checked]
    gaps = [check["largest_gap"] for check in checks]
    num_tokens = sum(len(ids) for record in checked for ids in record["token_ids"])
    return {
        "num_texts": sum(check["num_texts"] for check in checks),
        "num_equal": sum(check["num_equal"] for check in checks),
        "share_agreeing": sum(check["num_agreeing_tokens"] for check in checks) / num_tokens if num_tokens else 1.0,
        "share_chosen": 1 - sum(check["num_not_chosen"] for check in checks) / num_tokens if num_tokens else 1.0,
        "largest_gap": None if None in gaps else max(gaps),
        "is_lossless": all(check["is_lossless"] for check in checks),
    }
