"""`hispec-bench`: methods side by side on the same prompts, with a losslessness check beside every speed."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoints import fingerprint, heads_fingerprint, package_versions, write_atomically
from ..heads import find_kernels
from ..recipes import resolve_model
from . import plan_command
from .bench_file import BenchFile, round_key
from .bench_report import bench_files, describe_cells, describe_failures
from .bench_schema import MethodResult, Result
from .bench_summary import is_lossless, summarise
from .benchmark import Benchmark, BenchOptions
from .config import LOSSY_METHODS, EngineConfig
from .engine import Engine
from .footprint import level_bytes
from .huge_pages import has_asked, restart_in_huge_pages
from .methods import METHODS, choose_methods
from .prompt import Prompt
from .prompt_sets import HUB_SETS, PromptSet, read_prompt_set
from .way import BLOCK_SIZE, WaySettings

SCHEMA = 2
QUICK_SECONDS = 140
"""Of `--quick`, from the first warm-up; loading a small model and the report come on top: under three minutes."""
QUICK = {"limit": 2, "max_new_tokens": 32, "repeats": 1}
USUAL = {"limit": 10, "max_new_tokens": 128, "repeats": 3}


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="hispec-bench", description=__doc__)

    def add(flag: str, **options: Any) -> None:
        parser.add_argument(*dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))), **options)

    add("--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    add("--adapter", metavar="NAME", help="folder or hub id of the heads (default: the shipped ones)")
    add(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help=f'JSONL of {{"prompt": ..., "id": optional}}, or a set of the hub ({", ".join(HUB_SETS)}); '
        "may be given again",
    )
    add("--limit", type=int, metavar="N", help=f"prompts of each set (default: {USUAL['limit']})")
    add(
        "--methods",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help=f"of {', '.join(METHODS)} (default: all that the heads serve, but auto, those with +ngram and sprinter, "
        "which is LOSSY); generate always runs",
    )
    add("--batch-size", type=_numbers(int), default=(1,), metavar="N,N", help="prompts side by side (default: 1)")
    add("--max-new-tokens", type=int, metavar="N", help=f"of each answer (default: {USUAL['max_new_tokens']})")
    add("--temperature", type=_numbers(float), default=(0.0,), metavar="T,T", help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="of sampled texts (default: 0)")
    add("--num-draft-tokens", type=int, default=2, metavar="N", help="before a verification (default: 2)")
    add("--num-provisional-tokens", type=int, default=4, metavar="N", help="before the target is asked (default: 4)")
    add(
        "--verifier-threshold",
        type=float,
        default=0.5,
        metavar="P",
        help="of sprinter, which is lossy: how sure its verifier must be of a token (default: 0.5)",
    )
    add("--repeats", type=int, metavar="N", help=f"times that each prompt is measured (default: {USUAL['repeats']})")
    add("--dtype", default="auto", help="auto, float32 (all texts must be equal), bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--quick",
        action="store_true",
        help=f"a look, in under three minutes for a small model: {QUICK['limit']} prompts of each set, "
        f"{QUICK['max_new_tokens']} tokens, once",
    )
    add(
        "--plan",
        action="store_true",
        help="measure nothing but the machine, and print what the planner chooses for each batch size (as hispec-plan)",
    )
    add("--output", type=Path, metavar="FOLDER", help="report, figures and measurements (default: runs/bench/MODEL)")
    add("--json", action="store_true", help="print the result as one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for a text that is not the model's own, 2 for what the user can
    mend, 130 after Ctrl-C, when the same command goes on from there."""
    options = build_parser().parse_args(argv)
    if options.plan:
        return plan_command.main(plan_arguments(options))
    if argv is None:
        restart_in_huge_pages()
    for name, value in (QUICK if options.quick else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.output is None:
        options.output = Path("runs", "bench", PurePath(options.model.partition("@")[0]).name)
    # What peers warn of at every call is not what is asked here; what they refuse stands in the table.
    loggers = [logging.getLogger(name) for name in ("transformers", "ContinuousBatchingLogger")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        return _run(options)
    except (OSError, ValueError) as error:
        print(f"hispec-bench: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"hispec-bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nhispec-bench: interrupted; the same command goes on from {options.output}", file=sys.stderr)
        return 130
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _run(options: argparse.Namespace) -> int:
    if not options.prompts:
        raise ValueError(f"there are no prompts; give --prompts FILE, or a set of the hub ({', '.join(HUB_SETS)})")
    if options.limit < 1:
        raise ValueError(f"--limit is {options.limit}; it must be at least 1")
    choose_methods(options.methods, 0)  # before a model is loaded: are all names known?
    source = str(resolve_model(options.model))
    print(f"{options.model} is {source}", file=sys.stderr)
    engine = Engine.from_pretrained(
        options.model, adapter=options.adapter, dtype=options.dtype, device=options.device, max_num_seqs=1
    )
    bench_options = BenchOptions(
        methods=tuple(choose_methods(options.methods, len(engine.model.heads))),
        batch_sizes=options.batch_size,
        temperatures=options.temperature,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        num_repeats=options.repeats,
    )
    sets = read_sets(engine, options)
    settings = way_settings(options, sets)
    benchmark = Benchmark(engine.model, sets, bench_options, settings)
    start = describe_run(engine, source, options, bench_options, sets)
    with BenchFile(options.output, start, len(bench_options.methods)) as file:
        is_complete = measure(benchmark, file, QUICK_SECONDS if options.quick else None)
        result = build_result(engine, settings, benchmark, file, start, is_complete=is_complete)
        write_result(options.output, result)
        file.finish()
    print(json.dumps(result) if options.json else describe_cells(result["cells"]))
    print(f"report: {options.output / 'report.md'}", file=sys.stderr)
    if loud := describe_failures(result):
        print(loud, file=sys.stderr)
        return 1
    return 0


def plan_arguments(options: argparse.Namespace) -> list[str]:
    """The flags of `hispec-plan` that say the same; of several sets of prompts it takes the first."""
    flags = {
        "--model": options.model,
        "--adapter": options.adapter,
        "--dtype": options.dtype,
        "--device": options.device,
    }
    flags |= {"--batch-size": ",".join(map(str, options.batch_size)), "--limit": options.limit}
    flags |= {"--prompts": options.prompts[0] if options.prompts else None, "--max-new-tokens": options.max_new_tokens}
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    return [*given, *(["--json"] if options.json else [])]


def read_sets(engine: Engine, options: argparse.Namespace) -> list[PromptSet]:
    """All prompts; ValueError for two sets of one name, and as `read_prompt_set`."""

    def encode(prompt: Prompt) -> list[int]:
        return engine.encode_turn(prompt) if isinstance(prompt, str) else engine.encode(prompt)

    sets: list[PromptSet] = []
    max_length = engine.model.backbone.max_context - options.max_new_tokens
    for name in options.prompts:
        prompts = read_prompt_set(name, encode, limit=options.limit, max_length=max_length)
        if any(prompts.name == other.name for other in sets):
            raise ValueError(f"two sets are named {prompts.name}; rename a file")
        if prompts.num_skipped:
            print(f"{prompts.name}: {prompts.num_skipped} prompts are too long for the context", file=sys.stderr)
        sets.append(prompts)
    return sets


def way_settings(options: argparse.Namespace, sets: Sequence[PromptSet]) -> WaySettings:
    """What all ways are built with."""
    longest = max(len(token_ids) for prompts in sets for token_ids in prompts.token_ids) + options.max_new_tokens
    return WaySettings(
        num_draft_tokens=options.num_draft_tokens,
        num_provisional_tokens=options.num_provisional_tokens,
        verifier_threshold=options.verifier_threshold,
        max_num_seqs=max(options.batch_size),
        max_length=longest,
    )


def describe_run(
    engine: Engine, source: str, options: argparse.Namespace, bench: BenchOptions, sets: Sequence[PromptSet]
) -> dict[str, Any]:
    """All that makes two runs the same benchmark; of a local path only the last part is kept."""

    def shorten(name: str) -> str:
        return PurePath(name).name if Path(name).expanduser().is_dir() else name

    base = engine.model.base
    return {
        "model": shorten(source),
        "adapter": None if options.adapter is None else shorten(str(options.adapter)),
        "weights": fingerprint(base)["weights"],
        "heads": heads_fingerprint(engine.model.heads),
        "exit_layers": list(engine.model.exit_layers),
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if base.device.type == "cuda" else base.device.type,
        "num_threads": torch.get_num_threads(),
        "huge_pages": has_asked(),
        "has_kernels": base.device.type == "cpu" and find_kernels() is not None,
        "methods": list(bench.methods),
        "batch_sizes": list(bench.batch_sizes),
        "temperatures": list(bench.temperatures),
        "seed": bench.seed,
        "max_new_tokens": bench.max_new_tokens,
        "num_draft_tokens": options.num_draft_tokens,
        "num_provisional_tokens": options.num_provisional_tokens,
        "verifier_threshold": options.verifier_threshold,
        "num_repeats": bench.num_repeats,
        "sets": {prompts.name: {"num_prompts": len(prompts.ids), "digest": prompts.digest} for prompts in sets},
        "versions": package_versions(),
    }


def measure(benchmark: Benchmark, file: BenchFile, max_seconds: float | None) -> bool:
    """Measure what the file lacks, a round at a time; False where the time was up before the last one.

    At least one round is measured.
    """
    start = time.perf_counter()
    for record in file.records:
        benchmark.remember(record)
    rounds, measured = benchmark.rounds(), file.measured
    missing = [(number, each) for number, each in enumerate(rounds) if each.key not in measured]
    if measured:
        print(f"{len(measured)} of {len(rounds)} rounds are there already; going on", file=sys.stderr)
    if not missing:
        return True
    with tqdm(desc="warm up", unit="call", file=sys.stderr) as bar:

        def tell(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        benchmark.warm_up(tell)
    longest = 0.0
    with tqdm(total=len(rounds), initial=len(measured), desc="measure", unit="round", file=sys.stderr) as bar:
        for number, each in missing:
            before = time.perf_counter()
            if max_seconds is not None and longest and before - start + longest > max_seconds:
                return False
            bar.set_postfix_str(f"{each.set_name}, batch {each.batch_size}")
            file.append(benchmark.measure(each, number))
            longest = max(longest, time.perf_counter() - before)
            bar.update()
    return True


def build_result(
    engine: Engine,
    settings: WaySettings,
    benchmark: Benchmark,
    file: BenchFile,
    start: dict[str, Any],
    *,
    is_complete: bool,
) -> Result:
    """The document, from what was measured."""
    model = engine.model
    order = {each.key: number for number, each in enumerate(benchmark.rounds())}
    records = sorted(file.records, key=lambda record: order[round_key(record)])
    cells = summarise(records, model.backbone.num_layers)
    methods: dict[str, MethodResult] = {}
    for name in benchmark.options.methods:
        added = None
        if (engine_method := METHODS[name].engine_method) is not None:
            config = EngineConfig(
                method=engine_method,
                lossy=engine_method in LOSSY_METHODS,
                num_draft_tokens=settings.num_draft_tokens,
                num_provisional_tokens=settings.num_provisional_tokens,
                max_num_seqs=settings.max_num_seqs,
                ngram_drafts=METHODS[name].ngram_drafts,
            )
            added = level_bytes(model, config, settings.num_blocks * BLOCK_SIZE)
        methods[name] = {"promise": METHODS[name].promise, "about": METHODS[name].about, "added_bytes": added}
    weights = {weight.data_ptr(): weight.numel() * weight.element_size() for weight in model.base.parameters()}
    return {
        "schema": SCHEMA,
        "benchmark": start,
        "is_complete": is_complete,
        "base_bytes": sum(weights.values()),
        "memory_kind": benchmark.memory_kind,
        "max_gap": benchmark.max_gap,
        "is_lossless": is_lossless(cells),
        "methods": methods,
        "cells": cells,
    }


def write_result(folder: Path, result: Result) -> None:
    """`benchmark.json`, `report.md` and its figures; those of an earlier run that are no longer drawn go away."""
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    files = {"benchmark.json": json.dumps(result, indent=1) + "\n"} | bench_files(result)
    for path in figures.glob("*.svg"):
        if f"figures/{path.name}" not in files:
            path.unlink()
    for name, text in files.items():
        write_atomically(folder / name, text)


def _numbers(kind: type) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 1,4") from None

    return parse


if __name__ == "__main__":
    raise SystemExit(main())
