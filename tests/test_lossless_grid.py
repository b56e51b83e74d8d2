"""Greedy equality over the whole grid: architecture, method, lengths, batch, ending. Minutes, so marked slow."""

import itertools

import pytest
import torch

from hispec.infer import Engine, SamplingParams

from .models import ARCHITECTURE_NAMES, build_base, build_heads, reference, shallow
from .train_support import build_tokenizer

NUM_TOKENS = 14
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in (1, 7, 16, 17, 2, 33, 8, 12)]
LENGTHS = [
    *[(method, draft, 1) for method in ("autoregressive", "single-layer") for draft in range(1, 6)][4:],
    *(("hispec", draft, provisional) for draft in range(1, 6) for provisional in range(1, 9)),
    *((method, draft, 1) for method in ("adadecode", "ngram") for draft in (1, 4)),
    ("lookahead", 1, 1),
]
BATCHES = (1, 3, 8)
ENDINGS = ("length", "eos", "stop")


def asked(ending: str, own: list[int], tokenizer) -> tuple[SamplingParams, list[int]]:
    """What one request asks for, and the ids that must come: its own text, cut where the request ends it."""
    if ending == "length":
        number = 3 + len(own) % NUM_TOKENS
        return SamplingParams(max_new_tokens=number, ignore_eos=True), own[:number]
    place = next((i for i, token in enumerate(own) if i > 3 and token not in own[:i] and token > 2), len(own) - 1)
    if ending == "eos":
        params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(own[place],))
        return params, own[: own.index(own[place]) + 1]
    stop = tokenizer.decode([own[place]])
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=stop)
    for number in range(1, len(own) + 1):
        if stop and stop in tokenizer.decode(own[:number], skip_special_tokens=True):
            return params, own[:number]
    return params if stop else SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True), own


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_the_grid(architecture):
    base, tokenizer = shallow(build_base(architecture), 3), build_tokenizer()
    model = build_heads(base, "random", committed_context=True)
    own = [reference(base, prompt, NUM_TOKENS) for prompt in PROMPTS]
    # By the next architecture a pair of lengths meets another batch, and a prompt another ending.
    offset = ARCHITECTURE_NAMES.index(architecture)
    for number, (method, draft, provisional) in enumerate(LENGTHS, offset):
        batch, endings = BATCHES[number % 3], itertools.islice(itertools.cycle(ENDINGS), number // 3 % 3, None)
        engine = Engine(
            model,
            tokenizer,
            method=method,
            num_draft_tokens=draft,
            num_provisional_tokens=provisional,
            num_ngram_tokens=draft,
            max_num_seqs=batch,
            num_blocks=64,
            block_size=8,
        )
        each = [asked(next(endings), text, tokenizer) for text in own]
        completions = engine.generate(PROMPTS, [params for params, _ in each])
        found = [completion.token_ids for completion in completions]
        assert found == [expected for _, expected in each], (method, draft, provisional, batch)
