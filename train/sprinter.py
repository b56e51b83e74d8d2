"""Fit the verifier of an adapter's draft exit, for the LOSSY method `sprinter`, and put it beside the adapter.

It reads responses of the base to held-out prompts, in less than a minute for the default on two cores, and fits a
logistic model; nothing is written before the end.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import load_adapter, load_base, package_versions, save_verifier, shipped_adapter
from ..heads import EarlyExitModel
from ..infer import EngineConfig
from ..recipes import DataRecipe, list_recipes, load_recipe, resolve_model
from .draft_verifier import collect, fit, measure
from .online import OnlineStates
from .prompts import is_held_out
from .responses import Response, read_responses

NUM_TOKENS = 12_000


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m hispec.train.sprinter", description=__doc__)

    def add(flag: str, **options: Any) -> None:
        parser.add_argument(*dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))), **options)

    add("--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    add("--adapter", type=Path, metavar="FOLDER", help="the heads, and where the verifier goes (default: the shipped)")
    add("--responses", type=Path, required=True, metavar="FILE", help="the base's own: a run's responses.jsonl")
    add("--exit-layer", type=int, metavar="N", help="the exit that drafts (default: the shallowest)")
    add("--num-tokens", type=int, default=NUM_TOKENS, metavar="N", help=f"of answers to read (default: {NUM_TOKENS})")
    add(
        "--held-out-fraction",
        type=float,
        metavar="P",
        help="of the prompts: those that the heads were not trained on (default: the recipe's); 1 takes all",
    )
    add(
        "--with-state",
        action="store_true",
        help="let the verifier read the exit's hidden state too, which takes far more tokens to be worth it",
    )
    add("--dtype", default="auto", help="of the base: auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--json", action="store_true", help="print what was measured as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    start = time.perf_counter()
    try:
        folder = options.adapter or shipped_adapter(options.model)
        if folder is None or not folder.expanduser().is_dir():
            shown = "no adapter comes with this model" if folder is None else f"the adapter {folder} is no folder here"
            raise ValueError(f"{shown}; give --adapter FOLDER, where the verifier can be put")
        fraction = options.held_out_fraction or usual_fraction(options.model)
        chosen = choose_responses(options.responses, fraction, options.num_tokens)
        source = resolve_model(options.model)
        base, _ = load_base(source.source, dtype=options.dtype, device=options.device, revision=source.revision)
        model = load_adapter(folder, base=base)
        measured = fit_verifier(model, *chosen, exit_layer=options.exit_layer, reads_state=options.with_state)
    except (OSError, ValueError) as error:
        print(f"hispec.train.sprinter: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nhispec.train.sprinter: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(measured) if options.json else describe(measured))
    print(f"in {folder} after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


def usual_fraction(name: str) -> float:
    """Of the prompts those that an alias's recipe keeps for evaluation; for other models those of any recipe."""
    data = load_recipe(name).data if name in list_recipes() else DataRecipe()
    return data.held_out_fraction


def choose_responses(path: Path, fraction: float, num_tokens: int) -> tuple[list[Response], list[Response]]:
    """Those to fit to and those to measure with, half of `num_tokens` answer tokens each, as far as the file has them.

    All are of prompts that the heads were not trained on, where they are surer than they ought to be; no prompt is in
    both. ValueError for a file without two such prompts.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
    if not 0 < fraction <= 1:
        raise ValueError(f"held_out_fraction is {fraction}; it must be above 0 and at most 1")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the responses.jsonl of a run of hispec-train")
    parts: tuple[list[Response], list[Response]] = ([], [])
    sizes, part_of = [0, 0], dict[str, int]()
    for response in read_responses(path):
        if not is_held_out(response.prompt_id, fraction):
            continue
        part = part_of.setdefault(response.prompt_id, int(sizes[1] < sizes[0]))
        if sizes[part] < num_tokens / 2:
            parts[part].append(response)
            sizes[part] += response.num_answer_tokens
    if not all(parts):
        raise ValueError(
            f"{path} holds responses to {len(part_of)} prompts that were held out (fraction {fraction}), and fitting "
            "and measuring need one each; give a file of more prompts, or, where the heads were trained on none of it, "
            "--held-out-fraction 1"
        )
    return parts


def fit_verifier(
    model: EarlyExitModel,  # from an adapter's folder
    training: Sequence[Response],
    held_out: Sequence[Response],
    *,
    exit_layer: int | None = None,  # None takes the shallowest
    reads_state: bool = False,  # see `fit`
) -> dict[str, Any]:
    """Fit, measure on `held_out`, and put the verifier beside the adapter and into the model; what was measured.

    See `draft_verifier.measure`. Raises ValueError for an exit layer without a head.
    """
    exit_layer = model.exit_layers[0] if exit_layer is None else exit_layer
    if exit_layer not in model.exit_layers:
        known = ",".join(map(str, model.exit_layers))
        raise ValueError(f"exit layer {exit_layer} has no head; the adapter has exits at {known}")
    assert model.adapter_folder is not None
    states = OnlineStates([*training, *held_out])
    settings: dict[str, Any] = {"exit_index": model.exit_layers.index(exit_layer)}
    settings["max_window"] = EngineConfig().max_skipped_tokens
    known_rows = collect(model, states, range(len(training)), **settings)
    verifier = fit(known_rows, exit_layer, reads_state=reads_state)
    rows = collect(model, states, range(len(training), len(states.sequences)), **settings)
    measured = measure(verifier, rows)
    run = {"num_tokens": len(known_rows.is_accepted), "versions": package_versions()}
    save_verifier(verifier, model.adapter_folder, measured=measured, run=run)
    model.verifier = verifier
    return measured


def describe(measured: dict[str, Any]) -> str:
    """Some lines for the terminal."""
    auc = "unknown" if measured["auc"] is None else f"{measured['auc']:.3f}"
    lines = [
        f"held out: {measured['num_tokens']} drafted tokens, {measured['accepted']:.1%} of them the model's own; loss "
        f"{measured['loss']:.3f} (without a verifier {measured['loss_without']:.3f}), AUC {auc}",
        "threshold  trusted  of these the model's own",
    ]
    for row in measured["thresholds"]:
        right = "-" if row["right"] is None else f"{row['right']:.1%}"
        lines.append(f"{row['threshold']:9.2f}  {row['trusted']:7.1%}  {right:>6}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
