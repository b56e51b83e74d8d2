"""All that needs an NVIDIA GPU, in under five minutes: `python -m tests.gpu_check`. Written without one at hand.

Runs the tests that are marked `gpu`, then prints a line for each way to generate, with and without CUDA graphs: on a
random Llama of about a billion parameters whose drafts are all right (so the most that there is to gain), and on the
embedded model with its shipped heads. `ms a round` says what a drafted token costs, and what a verification.
"""

import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.infer.config import LOSSLESS_METHODS
from hispec.infer.peers import run_generate
from hispec.infer.recheck import Rechecker

from .models import shallow

NUMBER = 128
PARAMS = SamplingParams(max_new_tokens=NUMBER, ignore_eos=True)
SECONDS_FOR_TESTS, SECONDS_FOR_TIMINGS = 170, 110


def main() -> int:
    """Run it; returns the exit code of the tests, 1 where they took too long."""
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests"]
    try:
        code = subprocess.run(command, timeout=SECONDS_FOR_TESTS).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests were stopped after {SECONDS_FOR_TESTS} seconds", file=sys.stderr)
        code = 1
    stop = time.perf_counter() + SECONDS_FOR_TIMINGS
    measure("1B random, bfloat16", build_billion(), stop)
    for dtype in ("bfloat16", "float32"):
        engine = Engine.from_pretrained("smollm2", dtype=dtype, device="cuda", method="autoregressive")
        measure(f"smollm2, {dtype}", engine.model, stop)
    return code


def build_billion() -> EarlyExitModel:
    """The shape of Llama 3.2 1B; layers past the second change nothing, so that every exit knows the answer."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return EarlyExitModel.from_base(shallow(base, 2), (2, 4), "block", 32768)


def measure(name: str, model: EarlyExitModel, stop: float) -> None:
    """Print lines until the time is over."""
    prompts = [list(range(100 + place, 164 + place)) for place in range(8)]
    run_generate(model.base, prompts[:1], SamplingParams(max_new_tokens=8))
    plain = run_generate(model.base, prompts[:1], PARAMS)
    print(f"{name}, generate: {len(plain.token_ids[0]) / plain.seconds:.1f} tokens/s", flush=True)
    for batch in (1, 8):
        for method in LOSSLESS_METHODS:
            for block_size, graphs in ((256, True), (256, False), (16, None)):
                if time.perf_counter() > stop:
                    print(f"{name}: the rest is left out, the time is over", flush=True)
                    return
                options = {"method": method, "block_size": block_size, "max_num_seqs": batch, "cuda_graphs": graphs}
                line = f"{name}, batch {batch}, {method}, blocks of {block_size}, graphs {graphs}"
                try:
                    engine = Engine(model, num_blocks=batch * 512 // block_size, **options)
                except ValueError as refusal:
                    print(f"{line}: {refusal}", flush=True)
                    continue
                print(f"{line}: {time_engine(engine, prompts[:batch])}", flush=True)


def time_engine(engine: Engine, prompts: list[list[int]]) -> str:
    """Tokens a second of all prompts side by side, after one run that records and warms up."""
    engine.generate(prompts, PARAMS)
    torch.cuda.synchronize()
    start = time.perf_counter()
    completions = engine.generate(prompts, PARAMS)
    seconds = time.perf_counter() - start
    recheck = Rechecker(engine.model.base, engine.eos_ids)
    recheck(completions[0].prompt_token_ids, completions[0].token_ids, PARAMS)
    parts = [f"{sum(len(completion.token_ids) for completion in completions) / seconds:.1f} tokens/s"]
    for level, counts in completions[0].stats.levels.items():
        if counts.num_rounds:
            # A sequence's share of the time is that of its batch, divided.
            parts.append(f"{level} {1e3 * len(prompts) * counts.seconds / counts.num_rounds:.2f} ms a round")
        if counts.num_drafted:
            parts.append(f"keeps {counts.acceptance_rate:.0%}")
    return ", ".join([*parts, recheck.total.describe()])


if __name__ == "__main__":
    raise SystemExit(main())
