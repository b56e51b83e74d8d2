"""All that needs an NVIDIA GPU, in a few minutes: `python -m tests.gpu_check`.

Runs the tests that are marked `gpu`, then prints tokens a second of `generate` and of our methods on the embedded
model, by scaled dot products (blocks of 16) and by the paged kernel where it takes blocks of 256.
"""

import subprocess
import sys
import time
from typing import get_args

import torch

from hispec.infer import Engine, SamplingParams
from hispec.infer.config import Method
from hispec.infer.peers import run_generate
from hispec.infer.recheck import Rechecker

PROMPT = "Write a short story about a lighthouse."
NUMBER = 128


def main() -> int:
    """Run it; returns the exit code of the tests."""
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests"], timeout=180).returncode
    for dtype in ("bfloat16", "float32"):
        measure(dtype)
    return code


def measure(dtype: str) -> None:
    """Print one line for each way to generate."""
    first = Engine.from_pretrained("smollm2", dtype=dtype, device="cuda", max_num_seqs=1)
    prompt, params = first.encode_turn(PROMPT), SamplingParams(max_new_tokens=NUMBER)
    run_generate(first.model.base, [prompt], SamplingParams(max_new_tokens=8))
    plain = run_generate(first.model.base, [prompt], params)
    print(f"{dtype} generate: {len(plain.token_ids[0]) / plain.seconds:.1f} tokens/s", flush=True)
    for block_size in (16, 256):
        for method in get_args(Method):
            engine = Engine(first.model, first.tokenizer, method=method, block_size=block_size, max_num_seqs=1)
            engine.generate([prompt], SamplingParams(max_new_tokens=8))
            torch.cuda.synchronize()
            start = time.perf_counter()
            (completion,) = engine.generate([prompt], params)
            seconds = time.perf_counter() - start
            recheck = Rechecker(first.model.base, params)
            recheck(completion.prompt_token_ids, completion.token_ids)
            name = f"{dtype} {method}, blocks of {block_size}"
            rate = len(completion.token_ids) / seconds
            print(f"{name}: {rate:.1f} tokens/s, {recheck.total.describe()}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
