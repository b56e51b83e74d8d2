"""`hispec-plan`: which method, exits and lengths are fastest on this machine, or would be on another one."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..heads import EarlyExitModel
from ..recipes import resolve_model
from .acceptance_file import known_acceptance, prompts_digest, read_acceptance, write_acceptance
from .acceptance_probe import measure_acceptance
from .auto_check import check_auto, describe_auto
from .auto_plan import model_costs
from .config import SamplingParams
from .cost_model import Acceptance
from .engine import Engine
from .plan_check import Checked, check_plan, choice_share, describe_check, describe_result, median_error, rivals, sweep
from .planner import Plan, describe, plan
from .prompt import Prompt
from .prompt_file import PromptLine, read_prompt_file
from .what_if import DEVICES, SHAPES, Head, acceptance_on_paper, costs_on_paper, parse_device


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    try:
        return _plan_on_paper(options) if options.what_if is not None else _plan_here(options)
    except KeyboardInterrupt:
        print("\nhispec-plan: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"hispec-plan: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="hispec-plan",
        description="Measure what this machine takes, and choose method, exits and lengths; or do it on paper for "
        "another model and device, before anything is trained.",
    )

    def add(where: Any, flag: str, **options: Any) -> None:
        where.add_argument(*dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))), **options)

    sizes = {"type": _integers, "default": (1, 4, 16), "metavar": "N,N"}
    add(parser, "--batch-size", **sizes, help="texts side by side, a row of the table each (default: 1,4,16)")
    add(parser, "--json", action="store_true", help="print one JSON object a batch size and nothing else")
    here = parser.add_argument_group("on this machine")
    add(here, "--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    add(here, "--adapter", metavar="NAME", help="folder or hub id of the heads (default: the shipped ones)")
    about = "JSONL; measure on it how often the heads are right, and keep that for later plans"
    add(here, "--prompts", type=Path, metavar="FILE", help=about)
    add(here, "--max-new-tokens", type=int, default=128, metavar="N", help="of its answers (default: 128)")
    add(here, "--temperature", type=float, default=0.0, help="of its answers; 0 is greedy (default)")
    add(here, "--limit", type=int, default=16, metavar="N", help="prompts of it that are used (default: 16)")
    add(here, "--dtype", default="auto", help="float32, bfloat16, float16, or auto: that of the checkpoint")
    add(here, "--device", default="auto", metavar="NAME", help="auto, cpu or cuda; with --what-if see there")
    add(here, "--replan", action="store_true", help="measure anew what is on disk: the machine, and --prompts if given")
    about = "run the choice and others on --prompts beside what is predicted: some (default), or the full sweep"
    add(here, "--verify", nargs="?", const="some", choices=("some", "full"), help=about)
    paper = parser.add_argument_group("on paper")
    add(paper, "--what-if", choices=sorted(SHAPES), help="the shapes of this model; no model is loaded")
    paper.description = (
        f"--device is then one of {', '.join(DEVICES)}, or bandwidth=BYTES/S,flops=FLOP/S,launch=SECONDS (a layer's)."
    )
    add(
        paper,
        "--acceptance",
        type=_numbers,
        metavar="P,P",
        help="one exit: draft->target; two: draft->intermediate,intermediate->target[,draft->target]",
    )
    add(paper, "--exit-layers", type=_integers, metavar="N,N", help="default: an eighth and a quarter of the depth")
    add(paper, "--head", choices=("block", "mlp", "norm"), default="block", help="kind of the heads (default: block)")
    add(paper, "--draft-vocab-size", type=int, metavar="N", help="tokens that heads score (default: all)")
    add(paper, "--context", type=int, default=512, metavar="N", help="tokens before the new ones (default: 512)")
    return parser


def _plan_on_paper(options: argparse.Namespace) -> int:
    shape = SHAPES[options.what_if]
    if options.acceptance is None:
        raise ValueError("--what-if needs --acceptance, such as 0.7,0.8 (draft->intermediate,intermediate->target)")
    exits = options.exit_layers or (shape.num_layers // 8, shape.num_layers // 4)[: len(options.acceptance)]
    acceptance = acceptance_on_paper(exits, shape.num_layers, options.acceptance)
    if list(exits) != sorted(set(exits)) or not exits[0] >= 0 or not exits[-1] < shape.num_layers:
        raise ValueError(f"--exit-layers must rise within 0 to {shape.num_layers - 1}, the depth of {options.what_if}")
    device = parse_device("h100" if options.device == "auto" else options.device)
    heads = [
        Head(exit_layer=exit_layer, kind=options.head, draft_vocab_size=options.draft_vocab_size)
        for exit_layer in exits
    ]
    costs = costs_on_paper(shape, device, heads, context=options.context)
    _print(plan(costs, acceptance, options.batch_size), options)
    return 0


def _plan_here(options: argparse.Namespace) -> int:
    if options.acceptance is not None or options.exit_layers is not None:
        raise ValueError("--acceptance and --exit-layers go with --what-if; a model's own are taken from its adapter")
    if options.verify and options.prompts is None:
        raise ValueError("--verify needs --prompts FILE to run on")
    print(f"{options.model} is {resolve_model(options.model)}", file=sys.stderr)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    loading = {"adapter": options.adapter, "dtype": options.dtype, "device": options.device}
    engine = Engine.from_pretrained(options.model, **loading, method="autoregressive", max_num_seqs=1, num_blocks=1)
    model = engine.model
    prompts = [] if options.prompts is None else read_prompts(engine, options)
    acceptance = find_acceptance(model, prompts, params, anew=options.replan)
    costs = model_costs(model, {}, Engine, max_batch=max(options.batch_size), anew=options.replan)
    made = plan(costs, acceptance, options.batch_size)
    _print(made, options)
    if options.verify:
        others = (sweep if options.verify == "full" else rivals)(model.exit_layers)
        _print_check(check_plan(model, Engine, made, others, acceptance, prompts, params, show_progress=True), options)
        ratios = check_auto(model, Engine, prompts, params, options.batch_size, show_progress=True)
        print(json.dumps({"auto_to_plain": ratios}) if options.json else describe_auto(ratios))
    return 0


def _print_check(checked: dict[int, list[Checked]], options: argparse.Namespace) -> None:
    if not options.json:
        for size, rows in checked.items():
            print(f"\nbatch {size}\n{describe_check(rows)}")
        print(f"\n{describe_result(checked)}")
        return
    for size, rows in checked.items():
        record = {"median_error": median_error(rows), "choice_share": choice_share(rows)}
        print(json.dumps({"batch_size": size, "measured": [row.to_dict() for row in rows]} | record))
    rows = [row for each in checked.values() for row in each]
    shares = [choice_share(each) for each in checked.values()]
    summary = {"num_configurations": len(rows), "median_error": median_error(rows), "choice_share": min(shares)}
    print(json.dumps({"summary": summary}))


def read_prompts(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts that are used."""

    def read(name: Any, prompt: Prompt, settings: dict[str, Any]) -> PromptLine:
        del settings
        ids = engine.encode_turn(prompt) if isinstance(prompt, str) else engine.encode(prompt)
        return PromptLine(id=name, token_ids=ids, params=SamplingParams())

    lines, _ = read_prompt_file(options.prompts, read, skip_bad=False, ignore_fields=True)
    return [line.token_ids for line in lines[: options.limit]]


def find_acceptance(
    model: EarlyExitModel, prompts: list[list[int]], params: SamplingParams, *, anew: bool = False
) -> Acceptance:
    """Of prompts where there are any, measured once and kept; else what is known of the heads."""
    if not prompts or not model.heads:
        return known_acceptance(model, params.temperature)
    digest = prompts_digest(prompts, params)
    found = None if anew else read_acceptance(model, params.temperature, digest)
    if found is None:
        found = measure_acceptance(model, Engine, prompts, params, show_progress=True)
        write_acceptance(model, params.temperature, digest, found)
    return found


def _print(made: Plan, options: argparse.Namespace) -> None:
    if not options.json:
        print(describe(made))
        return
    for size, chosen in made.choices.items():
        record = {"batch_size": size} | asdict(chosen)
        record["plain_tokens_per_second"] = made.plain[size].tokens_per_second
        print(json.dumps(record))


def _integers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers such as 1,4") from None
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} holds a negative number")
    return numbers


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0.7,0.8") from None


if __name__ == "__main__":
    raise SystemExit(main())
