"""`hispec-train`: from a base model to an adapter with trained exit heads."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedModel

from ..checkpoints import check_push, load_base, push_adapter
from ..heads import EarlyExitModel, HeadKind
from ..recipes import (
    Recipe,
    describe_recipes,
    load_recipe,
    override,
    parse_exit_layers,
    resolve_exit_layers,
    show_exit_layers,
)
from .pipeline import make_adapter, preprocess, resolve
from .plan import describe_plan
from .ranks import Ranks, is_told, join_ranks, own_device
from .report import describe_report
from .usage import describe_usage


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; every one that is left out keeps the recipe's value."""
    parser = argparse.ArgumentParser(
        prog="hispec-train",
        description="Train early-exit heads for a causal LM on its own responses; save them as an adapter. "
        "The same command again, without --no-resume, goes on after any interruption where it was. "
        "Several processes, under torchrun, accelerate or deepspeed, share all the work.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="values put over the recipe's, in YAML, such as training.learning_rate=3e-4; flags win over them",
    )
    parser.add_argument(
        "--list-recipes", "--list_recipes", action="store_true", help="list the recipes that have an alias, and end"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="alias, hub id (user/name[@revision]) or folder of the base model"
    )
    parser.add_argument("--recipe", metavar="NAME", help="recipe: an alias or a YAML file (default: that of --model)")
    parser.add_argument(
        "--exit-layers",
        "--exit_layers",
        type=_layers,
        metavar="N,N",
        help="decoder layers run before each head, counts (4,8) or fractions of the depth (1/8,1/4), one or more "
        "(default: the recipe's, or about 1/8 and 1/4)",
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
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="prompts to answer, or responses to train on: a file (JSONL, JSON, Parquet, CSV, text), a folder, or a "
        "hub data set (user/name[:config[:split]]) of messages, ShareGPT, Alpaca, prompt/completion, text or token ids",
    )
    parser.add_argument("--num-tokens", "--num_tokens", type=int, metavar="N", help="response tokens to train on")
    _add_data_flags(parser)
    parser.add_argument("--max-steps", "--max_steps", type=int, metavar="N", help="end training after N steps")
    parser.add_argument(
        "--cache-layers",
        "--cache_layers",
        type=_layers,
        default=(),
        metavar="N,N",
        help="further exit layers to cache, for heads that are trained later",
    )
    parser.add_argument(
        "--online",
        action=argparse.BooleanOptionalAction,
        help="compute the base's hidden states anew in every step in place of caching them: no disk, but slower",
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
    parser.add_argument(
        "--deepspeed",
        metavar="zero2|zero3|FILE",
        help="partition the training state of the heads over the ranks, as shipped or as a DeepSpeed config says",
    )
    parser.add_argument(
        "--save-best",
        "--save_best",
        action=argparse.BooleanOptionalAction,
        help="make the adapter from the heads with the best held-out acceptance, not from the last ones",
    )
    # What the deepspeed launcher passes first.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help="dtype of the base: auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="try all stages on one batch, print what they cost, keep nothing",
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


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--regenerate",
        action=argparse.BooleanOptionalAction,
        help="whether the base answers anew where --data holds responses",
    )
    parser.add_argument(
        "--max-length",
        "--max_length",
        type=int,
        metavar="N",
        help="longest sequence of --data, in tokens: a longer one loses the beginning of its prompt",
    )
    parser.add_argument(
        "--preprocess-only", "--preprocess_only", action="store_true", help="end when the data is read, before training"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_intermixed_args(arguments)
    if options.list_recipes:
        print(describe_recipes())
        return 0
    try:
        with join_ranks(options.local_rank) as ranks, _silence(ranks):
            return _run(options, ["hispec-train", *arguments], ranks)
    except KeyboardInterrupt:
        without = "" if options.resume else " without --no-resume"
        print(f"\nhispec-train: interrupted; the same command{without} goes on where it was", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        if not is_told(error) or os.environ.get("RANK", "0") == "0":
            print(f"hispec-train: error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _silence(ranks: Ranks) -> Iterator[None]:
    """Let the main rank alone say what all of them do."""
    if ranks.is_main:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def resolve_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with the overrides, and then every flag that was given, put over it."""
    if options.recipe is None and options.model is None:
        raise ValueError("name a base model with --model or a recipe with --recipe, for example --model smollm2")
    recipe = load_recipe(options.recipe if options.recipe is not None else options.model)
    heads = {
        "heads.exit_layers": options.exit_layers,
        "heads.kinds": options.head,
        "heads.committed_context": options.committed_context,
        "heads.draft_vocab_size": options.draft_vocab_size,
    }
    whole_vocabulary = {"heads.draft_vocab_size": None} if options.draft_vocab_size == 0 else {}
    recipe = override(recipe, options.overrides, _given(heads) | whole_vocabulary)
    if options.recipe is not None and options.model is not None:
        other = load_recipe(options.model)
        # Named after its model, so that it does not go into the folder of the recipe's own runs.
        recipe = recipe if other.model == recipe.model else replace(recipe, name=other.name, model=other.model)
    states = None if options.online is None else "online" if options.online else "cached"
    training = {
        "max_steps": options.max_steps,
        "seed": options.seed,
        "deepspeed": options.deepspeed,
        "save_best": options.save_best,
    }
    return replace(
        recipe,
        data=replace(
            recipe.data,
            **_given({"prompts": options.data, "num_tokens": options.num_tokens, "states": states}),
            **_given({"regenerate": options.regenerate, "max_length": options.max_length}),
        ),
        training=replace(recipe.training, **_given(training)),
        output=options.output if options.output is not None else recipe.output,
    )


def _run(options: argparse.Namespace, command: Sequence[str], ranks: Ranks) -> int:
    with ranks.together():
        recipe = resolve_recipe(options)
        if options.push_to_hub is None and options.private:
            raise ValueError("--private goes with --push-to-hub only; leave it out")
        if options.push_to_hub is not None and ranks.is_main:
            check_push(options.push_to_hub, private=options.private)
        print(f"{recipe.name}: {recipe.model}, run in {recipe.output_folder()}", file=sys.stderr)
    with ranks.together():
        base, tokenizer = load_base(
            recipe.model.source, dtype=options.dtype, device=own_device(), revision=recipe.model.revision
        )
        recipe, cache_layers = _resolve_layers(recipe, options.cache_layers, base)
    if options.dry_run:
        if ranks.is_main:
            print(describe_plan(recipe, base, tokenizer, cache_layers=cache_layers, resume=options.resume))
        return 0
    try:
        if options.preprocess_only:
            responses = preprocess(recipe, base, tokenizer, ranks)
            print(f"sequences: {len(responses)} in {recipe.output_folder() / 'responses.jsonl'}")
            return 0
        adapter = make_adapter(
            recipe,
            base,
            tokenizer,
            cache_layers=cache_layers,
            resume=options.resume,
            command=command,
            ranks=ranks,
        )
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename}" if error.filename else error.strerror or error
        told = ValueError(
            f"cannot work in {recipe.output_folder()} ({what}); make room there, or choose another folder with "
            "--output: what is there is kept, and the same command goes on where it was"
        )
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error
    print(describe_report(adapter))
    print(describe_usage(json.loads((adapter / "run.json").read_text(encoding="utf-8"))["usage"]))
    print(f"adapter: {adapter}")
    if options.push_to_hub is not None and ranks.is_main:
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


def _resolve_layers(
    recipe: Recipe, cache_layers: Sequence[int | Fraction], base: PreTrainedModel
) -> tuple[Recipe, tuple[int, ...]]:
    """The recipe, and the layers to cache, with counts for layers; says which where they were not written."""
    written = recipe.heads.exit_layers
    recipe = resolve(recipe, base)
    num_layers = EarlyExitModel.from_configs(base, []).backbone.num_layers
    if written != recipe.heads.exit_layers:
        why = "about 1/8,1/4" if written is None else show_exit_layers(written)
        print(f"exit layers {show_exit_layers(recipe.heads.counts())} of {num_layers} ({why})", file=sys.stderr)
    return recipe, resolve_exit_layers(cache_layers, num_layers) if cache_layers else ()


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _layers(text: str) -> tuple[int | Fraction, ...]:
    try:
        return parse_exit_layers(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of layers; write counts such as 4,8 or fractions of the depth such as 1/8,1/4"
        ) from None
