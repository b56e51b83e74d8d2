"""The flags of `hispec-infer`, and what they say to requests and to the engine."""

import argparse
from pathlib import Path
from typing import Any, get_args

from .config import DraftPolicy, Method, PlanMode, SamplingParams
from .palette import When

REQUEST_FLAGS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "banned_token_ids", "stop", "include_stop", "stop_token_ids"),
    *("ignore_eos", "seed", "logprobs", "n"),
)
"""Fields of `SamplingParams` that have a flag of their name."""
ENGINE_FLAGS = (
    *("method", "num_draft_tokens", "num_provisional_tokens", "draft_policy", "min_confidence", "num_blocks"),
    "exact",
    "exit_layers",
    *("plan", "replan"),
    *("exit_confidence", "min_ngram", "max_ngram"),
    *("ngram_drafts", "num_ngram_tokens"),
    *("lookahead_window", "lookahead_ngram", "lookahead_candidates"),
    *("lossy", "verifier_threshold", "max_skipped_tokens"),
)
"""Fields of `EngineConfig` that have a flag of their name."""


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; those that were not given are None or empty."""
    parser = argparse.ArgumentParser(
        prog="hispec-infer",
        description="Generate text with a model's own output, sooner: early exits draft, the full depth decides.",
    )
    parser.add_argument(
        "--model", default="smollm2", metavar="NAME", help="alias, folder or hub id[@revision] (default: smollm2)"
    )
    parser.add_argument("--adapter", metavar="NAME", help="folder or hub id[@revision] of the heads (default: shipped)")
    _add_prompt_flags(parser.add_argument_group("prompts"))
    _add_sampling_flags(parser.add_argument_group("sampling"))
    _add_running_flags(parser.add_argument_group("running"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="write JSON lines there instead of text here")
    parser.add_argument(
        "--color",
        choices=get_args(When),
        default="auto",
        help="colour streamed text by the level that proposed each token (default: on a terminal, without NO_COLOR)",
    )
    parser.add_argument(
        "--check-lossless",
        "--check_lossless",
        action="store_true",
        help="let the model itself read each text again, and count the tokens that are not its own choice",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and nothing else")
    return parser


def request_params(options: argparse.Namespace) -> SamplingParams:
    """What the flags ask of every request; ValueError for values that make no sense."""
    return SamplingParams(**_given(options, REQUEST_FLAGS))


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say to the engine, as options of `EngineConfig`."""
    return _given(options, ENGINE_FLAGS) | {"max_num_seqs": options.batch_size}


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _add(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
    """A flag of several words is taken with hyphens and with underscores."""
    group.add_argument(*dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))), **options)


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    _add(group, "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given again")
    _add(
        group,
        "--input",
        type=Path,
        metavar="FILE",
        help='JSONL of {"prompt": text or messages, "id": optional}; a line may hold sampling parameters of its own, '
        "by their names in Python",
    )
    _add(group, "--skip-bad", action="store_true", help="run past bad lines of --input")
    _add(group, "--ignore-fields", action="store_true", help="take lines of --input that hold fields of other programs")
    _add(group, "--raw", action="store_true", help="take prompts as they are, without the chat template")
    _add(group, "--chat", action="store_true", help="talk in the terminal; /help lists its commands")
    _add(group, "--system", metavar="TEXT", help="a system message before each prompt's text, or the chat")


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    _add(group, "--max-new-tokens", type=int, default=256, metavar="N", help="most tokens to generate (default: 256)")
    _add(group, "--min-new-tokens", type=int, metavar="N", help="no end before so many")
    _add(group, "--temperature", type=float, help="0 is greedy (default)")
    _add(group, "--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 keeps all (default)")
    _add(
        group,
        "--top-p",
        type=float,
        metavar="P",
        help="keep the likeliest that reach P together; 1 keeps all (default)",
    )
    _add(group, "--min-p", type=float, metavar="P", help="keep those at least P times as likely as the likeliest")
    _add(group, "--repetition-penalty", type=float, metavar="X", help="above 1: against what was said; 1 is none")
    _add(group, "--presence-penalty", type=float, metavar="X", help="off the logit of what the text holds; 0 is none")
    _add(group, "--frequency-penalty", type=float, metavar="X", help="the same for each time it stands there")
    _add(group, "--banned-token-ids", type=int, nargs="+", metavar="ID", help="tokens that are never chosen")
    _add(group, "--stop", action="append", metavar="TEXT", help="a text that ends the answer; may be given again")
    _add(group, "--include-stop", action="store_true", default=None, help="keep the stop text in the answer")
    _add(group, "--stop-token-ids", type=int, nargs="+", metavar="ID", help="tokens that end the answer too")
    _add(group, "--ignore-eos", action="store_true", default=None, help="go on past the model's end tokens")
    _add(group, "--seed", type=int, help="the same text again, whatever the method or batch")
    _add(group, "--logprobs", type=int, metavar="K", help="in JSON: log-probabilities, and those of the K likeliest")
    _add(group, "--n", type=int, metavar="N", help="answers to each prompt (default: 1)")


def _add_running_flags(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "--method",
        choices=get_args(Method),
        help="default: hispec, or as much of it as the heads allow; sprinter is LOSSY and needs --lossy",
    )
    _add(
        group,
        "--exit-layers",
        type=_exit_layers,
        metavar="N,N",
        help="of an adapter with more exits than the method uses: those that serve, the draft's first "
        "(default: the shallowest)",
    )
    _add(group, "--num-draft-tokens", type=int, metavar="N", help="before a verification (default: 2)")
    _add(group, "--num-provisional-tokens", type=int, metavar="N", help="before the target is asked (default: 4)")
    _add(
        group,
        "--draft-policy",
        choices=get_args(DraftPolicy),
        help="dynamic: draft less where the heads are unsure (default: fixed)",
    )
    _add(group, "--min-confidence", type=float, metavar="P", help="of dynamic: how unsure is too unsure (default: 0.3)")
    _add(
        group,
        "--plan",
        choices=get_args(PlanMode),
        help="auto: choose method, exits and lengths by what this machine takes (measured once) and how often the "
        "heads were measured right",
    )
    _add(group, "--replan", action="store_true", default=None, help="measure this machine anew for the plan")
    _add(group, "--exit-confidence", type=float, metavar="P", help="of adadecode: how sure an exit is (default: 0.75)")
    _add(
        group,
        "--ngram-drafts",
        action="store_true",
        default=None,
        help="of single-layer and hispec: copy drafts from the prompt and the text where that promises more than the "
        "exits (default: not)",
    )
    _add(group, "--no-ngram-drafts", dest="ngram_drafts", action="store_false", default=None, help="do not")
    _add(group, "--num-ngram-tokens", type=int, metavar="N", help="most that are copied at once (default: 8)")
    _add(group, "--min-ngram", type=int, metavar="N", help="fewest tokens that must match (default: 1)")
    _add(group, "--max-ngram", type=int, metavar="N", help="most tokens that are looked for (default: 4)")
    _add(group, "--lookahead-window", type=int, metavar="N", help="of lookahead: guesses side by side (default: 5)")
    _add(group, "--lookahead-ngram", type=int, metavar="N", help="of lookahead: tokens of an n-gram (default: 4)")
    _add(
        group,
        "--lookahead-candidates",
        type=int,
        metavar="N",
        help="of lookahead: n-grams verified at once (default: 5)",
    )
    _add(
        group,
        "--lossy",
        action="store_true",
        default=None,
        help="with --method sprinter: take texts that are NOT the model's own; a trained verifier lets drafted tokens "
        "through unseen by the model",
    )
    _add(
        group,
        "--verifier-threshold",
        type=float,
        metavar="P",
        help="of sprinter: how sure the verifier must be of a token (default: 0.5); higher is slower and nearer to "
        "the model",
    )
    _add(group, "--max-skipped-tokens", type=int, metavar="N", help="of sprinter: most in a row (default: 8)")
    _add(group, "--batch-size", type=int, default=1, metavar="N", help="texts side by side (default: 1)")
    _add(group, "--num-blocks", type=int, metavar="N", help="of 16 tokens, in the KV cache")
    _add(group, "--exact", action="store_true", help="the same bits by every method, batch and draft length; slower")
    _add(group, "--dtype", default="auto", help="float32, bfloat16, float16, or auto: that of the checkpoint")
    _add(group, "--device", default="auto", help="auto, cpu or cuda")


def _exit_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write the adapter's, such as 4,8") from None
