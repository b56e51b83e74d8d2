"""`hispec-train`: from a base model to an adapter with trained exit heads."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..checkpoints import check_push, load_base, push_adapter
from ..heads import HeadKind
from ..recipes import Recipe, load_recipe
from .pipeline import make_adapter
from .plan import describe_plan
from .report import describe_report


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; every one that is left out keeps the recipe's value."""
    parser = argparse.ArgumentParser(
        prog="hispec-train",
        description="Train early-exit heads for a causal LM on its own responses; save them as an adapter. "
        "The same command again, without --no-resume, goes on after any interruption where it was.",
    )
    parser.add_argument("--model", metavar="NAME", help="alias, hub id or folder of the base model")
    parser.add_argument("--recipe", metavar="NAME", help="recipe: an alias or a YAML file (default: that of --model)")
    parser.add_argument(
        "--exit-layers",
        "--exit_layers",
        type=_layers,
        metavar="N,N",
        help="decoder layers run before each head (default: the recipe's, or about 1/8 and 1/4 of the depth)",
    )
    parser.add_argument(
        "--head",
        type=lambda text: tuple(text.split(",")),
        metavar="KIND[,KIND]",
        help=f"kind of the heads, one for all or one for each exit: {', '.join(get_args(HeadKind))}",
    )
    parser.add_argument(
        "--committed-context",
        "--committed_context",
        action=argparse.BooleanOptionalAction,
        help="whether heads see the final state of the newest committed token",
    )
    parser.add_argument(
        "--draft-vocab-size",
        "--draft_vocab_size",
        type=int,
        metavar="N",
        help="token ids that a head scores, the most frequent ones; 0 for the whole vocabulary",
    )
    parser.add_argument("--data", metavar="FILE", help='prompts: JSONL of {"id", "kind", "prompt"}')
    parser.add_argument("--num-tokens", "--num_tokens", type=int, metavar="N", help="response tokens to regenerate")
    parser.add_argument("--max-steps", "--max_steps", type=int, metavar="N", help="end training after N steps")
    parser.add_argument(
        "--cache-layers",
        "--cache_layers",
        type=_layers,
        default=(),
        metavar="N,N",
        help="further exit layers to cache, for heads that are trained later",
    )
    parser.add_argument("--output", metavar="FOLDER", help="folder of the run (default: runs/NAME)")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the checkpoints in --output; --no-resume trains anew, on the same responses (interrupted, "
        "the same command without --no-resume goes on where it was)",
    )
    parser.add_argument("--seed", type=int, help="seed of sampling, of the order of the data and of the windows")
    parser.add_argument("--dtype", default="auto", help="dtype of the base: auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print the plan and what it costs, and do nothing"
    )
    parser.add_argument(
        "--push-to-hub",
        "--push_to_hub",
        metavar="USER/NAME",
        help="put the adapter into this repository on the Hugging Face Hub at the end; whether the token "
        "(HF_TOKEN, or that of `hf auth login`) allows it is asked before the training",
    )
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: make the repository private")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(arguments)
    try:
        return _run(options, ["hispec-train", *arguments])
    except KeyboardInterrupt:
        without = "" if options.resume else " without --no-resume"
        print(f"\nhispec-train: interrupted; the same command{without} goes on where it was", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"hispec-train: error: {error}", file=sys.stderr)
        return 2


def resolve_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with every flag that was given put over it."""
    if options.recipe is None and options.model is None:
        raise ValueError("name a base model with --model or a recipe with --recipe, for example --model smollm2")
    recipe = load_recipe(options.recipe if options.recipe is not None else options.model)
    if options.recipe is not None and options.model is not None:
        other = load_recipe(options.model)
        # Named after its model, so that it does not go into the folder of the recipe's own runs.
        recipe = recipe if other.model == recipe.model else replace(recipe, name=other.name, model=other.model)
    size = options.draft_vocab_size
    heads = {
        "exit_layers": options.exit_layers,
        "kinds": options.head,
        "committed_context": options.committed_context,
        "draft_vocab_size": size,
    }
    return replace(
        recipe,
        heads=replace(recipe.heads, **{**_given(heads), **({"draft_vocab_size": None} if size == 0 else {})}),
        data=replace(recipe.data, **_given({"prompts": options.data, "num_tokens": options.num_tokens})),
        training=replace(recipe.training, **_given({"max_steps": options.max_steps, "seed": options.seed})),
        output=options.output if options.output is not None else recipe.output,
    )


def _run(options: argparse.Namespace, command: Sequence[str]) -> int:
    recipe = resolve_recipe(options)
    if options.push_to_hub is not None:
        check_push(options.push_to_hub, private=options.private)
    elif options.private:
        raise ValueError("--private goes with --push-to-hub only; leave it out")
    print(f"{recipe.name}: {recipe.model.source}, run in {recipe.output_folder()}", file=sys.stderr)
    base, tokenizer = load_base(recipe.model.source, dtype=options.dtype, revision=recipe.model.revision)
    if options.dry_run:
        print(describe_plan(recipe, base, tokenizer, cache_layers=options.cache_layers, resume=options.resume))
        return 0
    try:
        adapter = make_adapter(
            recipe, base, tokenizer, cache_layers=options.cache_layers, resume=options.resume, command=command
        )
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename}" if error.filename else error.strerror or error
        raise ValueError(
            f"cannot work in {recipe.output_folder()} ({what}); make room there, or choose another folder with "
            "--output: what is there is kept, and the same command goes on where it was"
        ) from error
    print(describe_report(adapter))
    print(f"adapter: {adapter}")
    if options.push_to_hub is not None:
        _push(adapter, options.push_to_hub, private=options.private)
    return 0


def _push(adapter: Path, repo: str, *, private: bool) -> None:
    command = shlex.join(["hispec-push", str(adapter), repo, *(["--private"] if private else [])])
    try:
        print(f"pushed: {push_adapter(adapter, repo, private=private)}")
    except (OSError, ValueError) as error:
        raise ValueError(f"the adapter is in {adapter}, but was not pushed: {error}; then run `{command}`") from error
    except KeyboardInterrupt:
        print(f"\nthe adapter is in {adapter}; to push it run `{command}`", file=sys.stderr)
        raise


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write counts such as 4,8") from None
