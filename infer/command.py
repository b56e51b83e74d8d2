"""`hispec-infer`: from prompts to text in the terminal, in a file, or as JSON."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, get_args

from tqdm import tqdm

from ..recipes import resolve_model
from .chat import Chat
from .config import Method, SamplingParams
from .engine import Completion, Engine, Prompt
from .palette import Painter, When, legend, wants_colour
from .prompt_file import PromptLine, read_prompt_file
from .recheck import Rechecker, check_rechecked
from .stats import Stats


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="hispec-infer",
        description="Generate text with a model's own output, sooner: early exits draft, the full depth decides.",
    )
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    parser.add_argument("--adapter", metavar="NAME", help="folder or hub id of the heads (default: the shipped ones)")
    source = parser.add_argument_group("prompts")
    source.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given again")
    source.add_argument(
        "--input", type=Path, metavar="FILE", help='JSONL of {"prompt": text or messages, "id": optional}'
    )
    source.add_argument("--skip-bad", "--skip_bad", action="store_true", help="run past bad lines of --input")
    source.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    source.add_argument("--chat", action="store_true", help="talk in the terminal; /help lists its commands")
    source.add_argument("--system", metavar="TEXT", help="a system message before each prompt's text, or the chat")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-k", "--top_k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    sampling.add_argument("--top-p", "--top_p", type=float, default=1.0, metavar="P", help="1 keeps all (default)")
    sampling.add_argument("--seed", type=int, help="the same text again, whatever the method or batch")
    running = parser.add_argument_group("running")
    running.add_argument(
        "--method",
        choices=get_args(Method),
        help="default: hispec, or autoregressive where there are no heads",
    )
    running.add_argument(
        "--num-draft-tokens", "--num_draft_tokens", type=int, metavar="N", help="before a verification"
    )
    running.add_argument(
        "--num-provisional-tokens",
        "--num_provisional_tokens",
        type=int,
        metavar="N",
        help="before the target is asked",
    )
    running.add_argument("--batch-size", "--batch_size", type=int, default=1, metavar="N", help="prompts side by side")
    running.add_argument("--num-blocks", "--num_blocks", type=int, metavar="N", help="of 16 tokens, in the KV cache")
    running.add_argument(
        "--exact", action="store_true", help="the same bits by every method, batch and draft length; slower"
    )
    running.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    running.add_argument("--device", default="auto", help="auto, cpu or cuda")
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
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.check_lossless:
        check_rechecked(params)
    engine_options = {
        "method": options.method,
        "num_draft_tokens": options.num_draft_tokens,
        "num_provisional_tokens": options.num_provisional_tokens,
        "max_num_seqs": options.batch_size,
        "num_blocks": options.num_blocks,
        "exact": options.exact,
    }
    print(f"{options.model} is {resolve_model(options.model).source}", file=sys.stderr)
    engine = Engine.from_pretrained(
        options.model,
        adapter=options.adapter,
        dtype=options.dtype,
        device=options.device,
        **{name: value for name, value in engine_options.items() if value is not None},
    )
    use_colour = wants_colour(options.color, sys.stdout)
    if options.chat:
        Chat(engine, params, system=options.system, use_colour=use_colour).run()
        return 0
    lines = read_prompts(engine, options, params)
    recheck = Rechecker(engine.model.base, params) if options.check_lossless else None
    start = time.perf_counter()
    if options.output is None and not options.json and options.batch_size == 1:
        stream_to_terminal(engine, lines, params, use_colour=use_colour, recheck=recheck)
    else:
        with open_output(options.output) as file:
            as_json = options.json or options.output is not None
            output = WholeLines(file, options.output)
            write_results(engine, lines, params, output, as_json=as_json, recheck=recheck)
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

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not options.raw:
            token_ids = engine.encode_turn(prompt, options.system)
        else:
            token_ids = engine.encode(prompt)
        engine.check_room(token_ids, params)
        return token_ids

    lines = [
        PromptLine(id=f"prompt-{number}", token_ids=encode(prompt)) for number, prompt in enumerate(options.prompt, 1)
    ]
    if options.input is not None:
        read, complaints = read_prompt_file(options.input, encode, skip_bad=options.skip_bad)
        lines.extend(read)
        for complaint in complaints:
            print(f"skipped: {complaint}", file=sys.stderr)
    return lines


def stream_to_terminal(
    engine: Engine,
    lines: Sequence[PromptLine],
    params: SamplingParams,
    *,
    use_colour: bool,
    recheck: Rechecker | None = None,
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
        for delta in engine.stream(line.token_ids, params):
            print(painter.paint(delta) if painter else delta.text, end="", flush=True)
            token_ids += delta.token_ids
        print()
        if recheck is not None:
            recheck(line.token_ids, token_ids)


class WholeLines:
    """Writes whole lines, each at once: a full disk costs the line that did not fit, and leaves no part of it."""

    def __init__(self, file: IO[str], path: Path | None) -> None:
        self._file = file
        self._path = path

    def write(self, text: str) -> None:
        """Write `text` and a line's end; OSError names the output and the remedy."""
        start = 0 if self._path is None else self._path.stat().st_size
        try:
            self._file.write(text + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._path is not None:
                os.truncate(self._path, start)
            place = self._path or "standard output"
            raise OSError(f"{place} cannot be written: {error.strerror}; make room, then run again") from None


def write_results(
    engine: Engine,
    lines: Sequence[PromptLine],
    params: SamplingParams,
    output: WholeLines,
    *,
    as_json: bool,
    recheck: Rechecker | None = None,
) -> None:
    """Write each completion as soon as it and all before it are finished; after Ctrl-C, all that are finished."""
    places = {engine.add_request(line.token_ids, params): place for place, line in enumerate(lines)}
    finished: dict[int, Completion] = {}
    num_written = 0

    def write(place: int) -> None:
        line, completion = lines[place], finished.pop(place)
        record = to_record(line, completion)
        if recheck is not None:
            record["recheck"] = recheck(line.token_ids, completion.token_ids).to_dict()
        output.write(json.dumps(record) if as_json else f"--- {line.id}\n{completion.text}")
        if completion.error is not None:
            tqdm.write(f"{line.id}: {completion.error}", file=sys.stderr)

    with tqdm(total=len(lines), unit="prompt", file=sys.stderr) as bar:
        try:
            while engine.has_unfinished:
                for completion in engine.step():
                    finished[places[completion.request_id]] = completion
                    bar.update()
                while num_written in finished:
                    write(num_written)
                    num_written += 1
        except KeyboardInterrupt:
            for place in sorted(finished):
                write(place)
            raise


def to_record(line: PromptLine, completion: Completion) -> dict[str, Any]:
    """A completion as JSON-ready values; `error` stands only where there is one."""
    error = {} if completion.error is None else {"error": completion.error}
    return error | {
        "id": line.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }


def check_output(path: Path | None, source: Path | None) -> None:
    """Raise ValueError, before a model is loaded, where the output cannot be written or is the input."""
    if path is None:
        return
    if source is not None and path.resolve() == source.resolve():
        raise ValueError(f"the output {path} is the input; choose another --output")
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"the output {path} cannot be written; choose another --output")


def open_output(path: Path | None) -> IO[str]:
    """The output file, or standard output; ValueError if it cannot be written."""
    if path is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the output {path} cannot be written: {error.strerror}; choose another --output") from None


def describe(stats: Stats, num_layers: int, seconds: float) -> str:
    """One line: speed, what each level kept, and layers run per token."""
    levels = [
        f"{name} keeps {level.acceptance_rate:.0%} of its drafts, {level.acceptance_length:.2f} tokens a round"
        for name, level in stats.levels.items()
        if level.num_drafted
    ]
    parts = [
        f"{stats.num_committed} tokens in {seconds:.1f} s, {stats.num_committed / seconds:.1f} tokens/s",
        *levels,
        f"{stats.layers_per_token:.1f} layers computed per token (the model has {num_layers})",
    ]
    return " | ".join(parts)
