"""The same prompts by the model's own `generate` and by every method of ours, side by side and in turn."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from ..recipes import resolve_model
from .completion import Completion
from .config import Method, SamplingParams
from .detokenizer import decode
from .engine import Engine
from .prompt import Prompt
from .prompt_file import PromptLine, read_prompt_file

PROMPTS = (
    "Anna has 3 baskets with 12 apples each. She sells 17 apples at the market. How many are left?",
    "Write a Python function that returns the longest word of a sentence.",
    "What should I see in Rome if I have only one day?",
)
GENERATE = "generate"


class Run(NamedTuple):
    """One answer and what it took."""

    token_ids: list[int]
    seconds: float
    completion: Completion | None

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return len(self.token_ids) / self.seconds


Way = Callable[[list[int]], Run]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code: 1 where a float32 text differs from that of `generate`."""
    parser = argparse.ArgumentParser(prog="python -m hispec.infer.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="alias, hub id or folder (default: smollm2)")
    parser.add_argument("--adapter", metavar="NAME", help="folder or hub id of the heads (default: the shipped ones)")
    parser.add_argument("--prompts", type=Path, action="append", metavar="FILE", help="JSONL; may be given again")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="prompts of each file (default: 10)")
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=64, metavar="N")
    parser.add_argument("--num-draft-tokens", "--num_draft_tokens", type=int, default=2, metavar="N")
    parser.add_argument("--num-provisional-tokens", "--num_provisional_tokens", type=int, default=4, metavar="N")
    parser.add_argument("--dtype", default="float32", help="float32 (all texts are equal; default) or bfloat16")
    options = parser.parse_args(argv)
    if options.limit < 1:
        parser.error(f"--limit is {options.limit}; it must be at least 1")
    try:
        return _run(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    print(f"loading {options.model} ({resolve_model(options.model).source})", file=sys.stderr)
    engine = Engine.from_pretrained(options.model, adapter=options.adapter, dtype=options.dtype, max_num_seqs=1)
    ways = build_ways(engine, options)

    def encode(prompt: Prompt) -> list[int]:
        return engine.encode_turn(prompt) if isinstance(prompt, str) else engine.encode(prompt)

    for way in ways.values():  # the first call of each allocates and warms up
        way(encode(PROMPTS[0])[:8])
    all_equal = True
    if options.prompts is None:
        runs = []
        for prompt in PROMPTS:
            print(f"\n> {prompt}\n")
            runs.append({name: way(encode(prompt)) for name, way in ways.items()})
            assert engine.tokenizer is not None
            print(decode(engine.tokenizer, runs[-1][GENERATE].token_ids), "\n")
            print("\n".join(describe(name, run, runs[-1][GENERATE]) for name, run in runs[-1].items()))
        all_equal &= print_table("all prompts", runs)
    for path in options.prompts or []:
        # Every way decodes greedily, whatever sampling a line asks for.
        lines, _ = read_prompt_file(
            path,
            lambda name, prompt, _: PromptLine(id=name, token_ids=encode(prompt), params=SamplingParams()),
            skip_bad=False,
            ignore_fields=True,
        )
        runs = []
        for line in tqdm(lines[: options.limit], desc=path.stem, unit="prompt"):
            runs.append({name: way(line.token_ids) for name, way in ways.items()})
        all_equal &= print_table(path.stem, runs)
    return 0 if all_equal or options.dtype != "float32" else 1


def build_ways(engine: Engine, options: argparse.Namespace) -> dict[str, Way]:
    """`generate` and our methods, all greedy and one prompt at a time."""
    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    ways: dict[str, Way] = {GENERATE: lambda ids: run_generate(engine.model.base, ids, options.max_new_tokens)}
    for method in get_args(Method):
        by_method = Engine(
            engine.model,
            engine.tokenizer,
            method=method,
            num_draft_tokens=options.num_draft_tokens,
            num_provisional_tokens=options.num_provisional_tokens,
            max_num_seqs=1,
        )
        ways[method] = lambda ids, by_method=by_method: run_engine(by_method, ids, params)  # type: ignore[misc]
    return ways


def run_generate(base: Any, ids: list[int], max_new_tokens: int) -> Run:
    """The plain greedy `generate` of transformers."""
    prompt = torch.tensor([ids], device=base.device)
    start = time.perf_counter()
    # Of the model's own settings only the end tokens: some ask for penalties that our greedy decoding does not have.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=base.generation_config.eos_token_id,
        pad_token_id=base.generation_config.pad_token_id,
    )
    output = base.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    return Run(output[0, len(ids) :].tolist(), time.perf_counter() - start, None)


def run_engine(engine: Engine, ids: list[int], params: SamplingParams) -> Run:
    """One of our methods."""
    start = time.perf_counter()
    completion = engine.generate([ids], params)[0]
    return Run(completion.token_ids, time.perf_counter() - start, completion)


def describe(name: str, run: Run, plain: Run) -> str:
    """One line for one answer."""
    text = "same text" if run.token_ids == plain.token_ids else "another text (a near tie)"
    parts = [f"  {name:<16} {run.rate:6.1f} tokens/s   {text}"]
    if run.completion is not None:
        stats = run.completion.stats
        parts += [f"{level} keeps {c.acceptance_rate:.0%}" for level, c in stats.levels.items() if c.num_drafted]
        parts.append(f"{stats.layers_per_token:.1f} layers a token")
    return " | ".join(parts)


def print_table(title: str, runs: Sequence[dict[str, Run]]) -> bool:
    """Medians over the prompts, ratios prompt by prompt; returns whether all texts were equal."""
    print(f"\n{title}: {len(runs)} prompts, medians")
    print(f"  {'':<16} tokens/s   x generate   texts equal   kept by the target   tokens a round")
    all_equal = True
    for name in runs[0]:
        rate = statistics.median(run[name].rate for run in runs)
        ratio = statistics.median(run[name].rate / run[GENERATE].rate for run in runs)
        num_equal = sum(run[name].token_ids == run[GENERATE].token_ids for run in runs)
        all_equal &= num_equal == len(runs)
        line = f"  {name:<16} {rate:8.1f}   {ratio:10.2f}   {num_equal:>5} of {len(runs):<3}"
        completions = [run[name].completion for run in runs]
        targets = [completion.stats.levels["target"] for completion in completions if completion is not None]
        num_drafted = sum(target.num_drafted for target in targets)
        if num_drafted:
            num_accepted = sum(target.num_accepted for target in targets)
            kept, length = num_accepted / num_drafted, num_accepted / sum(target.num_rounds for target in targets) + 1
            line += f"   {kept:18.0%}   {length:14.2f}"
        print(line)
    return all_equal


if __name__ == "__main__":
    raise SystemExit(main())
