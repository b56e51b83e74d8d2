"""`hispec-infer`: from prompts to text in the terminal, in a file, or as JSON."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..recipes import resolve_model
from .chat import Chat
from .config import SamplingParams
from .engine import Engine
from .flags import build_parser, engine_options, request_params
from .palette import Painter, legend, wants_colour
from .planner import describe as describe_plan
from .prompt import Prompt
from .prompt_file import PromptLine, read_prompt_file
from .recheck import Rechecker, check_rechecked
from .result_file import WholeLines, check_output, open_output, write_results
from .stats import Stats


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 if it broke off, 2 for what the user can mend, 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\nhispec-infer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads on; what is left in the buffer must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        print(f"hispec-infer: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"\nhispec-infer: error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    check_sources(options)
    check_output(options.output, options.input)
    params = request_params(options)
    if options.chat and params.n > 1:
        raise ValueError("--n does not go with --chat; leave one of them out")
    if options.check_lossless:
        check_rechecked(params)
    print(f"{options.model} is {resolve_model(options.model)}", file=sys.stderr)
    engine = Engine.from_pretrained(
        options.model,
        adapter=options.adapter,
        dtype=options.dtype,
        device=options.device,
        **engine_options(options),
    )
    if engine.plan is not None:
        print(describe_plan(engine.plan), file=sys.stderr)
    use_colour = wants_colour(options.color, sys.stdout)
    if options.chat:
        Chat(engine, params, system=options.system, use_colour=use_colour).run()
        return 0
    lines = read_prompts(engine, options, params)
    recheck = Rechecker(engine.model.base, engine.eos_ids) if options.check_lossless else None
    start = time.perf_counter()
    is_plain = options.output is None and not options.json
    if is_plain and options.batch_size == 1 and all(line.params.n == 1 for line in lines):
        stream_to_terminal(engine, lines, use_colour=use_colour, recheck=recheck)
    else:
        with open_output(options.output) as file:
            as_json = options.json or options.output is not None
            output = WholeLines(file, options.output)
            write_results(engine, lines, output, as_json=as_json, recheck=recheck)
    seconds = time.perf_counter() - start - (0 if recheck is None else recheck.seconds)
    print(describe(engine.stats, engine.model.backbone.num_layers, seconds), file=sys.stderr)
    if recheck is not None:
        print(recheck.total.describe(), file=sys.stderr)
    return 0


def check_sources(options: argparse.Namespace) -> None:
    """Raise ValueError, before a model is loaded, for flags that do not go together."""
    if options.chat:
        one_shot = {
            "--prompt": options.prompt,
            "--input": options.input,
            "--output": options.output,
            "--json": options.json,
            "--raw": options.raw,
            "--batch-size": options.batch_size != 1,
            "--check-lossless": options.check_lossless,
        }
        if wrong := [flag for flag, value in one_shot.items() if value]:
            raise ValueError(f"{wrong[0]} does not go with --chat; leave one of them out")
    elif not options.prompt and options.input is None:
        raise ValueError("there is no prompt; give --prompt TEXT, --input FILE or --chat")
    if options.raw and options.system is not None:
        raise ValueError("--system needs the chat template, which --raw leaves out; leave one of them out")


def read_prompts(engine: Engine, options: argparse.Namespace, params: SamplingParams) -> list[PromptLine]:
    """All prompts of the command line, as token ids; bad lines are told on standard error."""

    def read_prompt(name: Any, prompt: Prompt, settings: dict[str, Any]) -> PromptLine:
        if isinstance(prompt, str) and not options.raw:
            token_ids = engine.encode_turn(prompt, options.system)
        else:
            token_ids = engine.encode(prompt)
        own = replace(params, **settings)
        if options.check_lossless:
            check_rechecked(own)
        engine.check_params(own)
        engine.check_room(token_ids, own)
        return PromptLine(id=name, token_ids=token_ids, params=own)

    lines = [read_prompt(f"prompt-{number}", prompt, {}) for number, prompt in enumerate(options.prompt, 1)]
    if options.input is not None:
        read, complaints = read_prompt_file(
            options.input, read_prompt, skip_bad=options.skip_bad, ignore_fields=options.ignore_fields
        )
        lines.extend(read)
        for complaint in complaints:
            print(f"skipped: {complaint}", file=sys.stderr)
    return lines


def stream_to_terminal(
    engine: Engine, lines: Sequence[PromptLine], *, use_colour: bool, recheck: Rechecker | None = None
) -> None:
    """Print each completion as it grows, one after the other."""
    use_colour = use_colour and len(engine.stats.levels) > 1
    if use_colour:
        print(legend(tuple(engine.stats.levels)), file=sys.stderr)
    for line in lines:
        if len(lines) > 1:
            print(f"--- {line.id}")
        assert engine.tokenizer is not None
        painter = Painter(engine.tokenizer) if use_colour else None
        token_ids: list[int] = []
        for delta in engine.stream(line.token_ids, line.params):
            print(painter.paint(delta) if painter else delta.text, end="", flush=True)
            token_ids += delta.token_ids
        print()
        if recheck is not None:
            recheck(line.token_ids, token_ids, line.params)


def describe(stats: Stats, num_layers: int, seconds: float) -> str:
    """One line: speed, what each level kept, and layers run per token."""
    levels = [
        f"{name} keeps {level.acceptance_rate:.0%} of its drafts, {level.acceptance_length:.2f} tokens a round"
        for name, level in stats.levels.items()
        if level.num_drafted
    ]
    if stats.num_skipped:
        levels.append(f"LOSSY: {stats.num_skipped} tokens were never shown to the model for judgement")
    parts = [
        f"{stats.num_committed} tokens in {seconds:.1f} s, {stats.num_committed / seconds:.1f} tokens/s",
        *levels,
        f"{stats.layers_per_token:.1f} layers computed per token (the model has {num_layers})",
    ]
    return " | ".join(parts)
