"""Three prompts by the model's own `generate` and by every method of ours, side by side; for more: `hispec-bench`."""

import argparse
import sys
from collections.abc import Sequence

from ..recipes import resolve_model
from .bench_report import describe_cells
from .bench_summary import rate, summarise
from .benchmark import Benchmark, BenchOptions, Record
from .detokenizer import decode
from .engine import Engine
from .levels import METHODS
from .methods import BASELINE
from .prompt_sets import PromptSet
from .way import WaySettings

PROMPTS = (
    "Anna has 3 baskets with 12 apples each. She sells 17 apples at the market. How many are left?",
    "Write a Python function that returns the longest word of a sentence.",
    "What should I see in Rome if I have only one day?",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code: 1 where a text is not the model's own."""
    parser = argparse.ArgumentParser(prog="python -m hispec.infer.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    parser.add_argument("--adapter", metavar="NAME", help="folder or hub id of the heads (default: the shipped ones)")
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=64, metavar="N")
    parser.add_argument("--dtype", default="float32", help="float32 (all texts are equal; default) or bfloat16")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    print(f"loading {options.model} ({resolve_model(options.model)})", file=sys.stderr)
    engine = Engine.from_pretrained(options.model, adapter=options.adapter, dtype=options.dtype, max_num_seqs=1)
    assert engine.tokenizer is not None
    prompts = PromptSet(
        name="demo",
        ids=list(PROMPTS),
        token_ids=[engine.encode_turn(prompt) for prompt in PROMPTS],
    )
    ours = METHODS[: len(engine.model.heads) + 1]
    bench_options = BenchOptions(methods=(BASELINE, *ours), max_new_tokens=options.max_new_tokens)
    longest = max(map(len, prompts.token_ids)) + options.max_new_tokens
    benchmark = Benchmark(engine.model, [prompts], bench_options, WaySettings(max_length=longest))
    benchmark.warm_up()
    records: list[Record] = []
    for number, (prompt, each) in enumerate(zip(PROMPTS, benchmark.rounds(), strict=True)):
        print(f"\n> {prompt}\n")
        measured = benchmark.measure(each, number)
        print(decode(engine.tokenizer, measured[0]["token_ids"][0]), "\n")
        print("\n".join(map(describe, measured)))
        records += measured
    cells = summarise(records, engine.model.backbone.num_layers)
    print("\n" + describe_cells(cells))
    return 0 if all(cell["check"] is None or cell["check"]["is_lossless"] for cell in cells) else 1


def describe(record: Record) -> str:
    """One line for one answer."""
    check = record["check"]
    text = "same text" if check["num_equal"] else "another text" + " (a near tie)" * check["is_lossless"]
    parts = [f"  {record['method']:<16} {rate(record):6.1f} tokens/s   {text}"]
    if record["stats"] is not None:
        levels = record["stats"]["levels"].items()
        parts += [f"{name} keeps {level['acceptance_rate']:.0%}" for name, level in levels if level["num_drafted"]]
        parts.append(f"{record['stats']['layers_per_token']:.1f} layers a token")
    return " | ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
