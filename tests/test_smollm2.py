"""The shipped adapter on the real model: the model's own text, and heads that know something."""

import pytest

from hispec.infer import Engine, SamplingParams
from hispec.infer.config import LOSSLESS_METHODS

from .models import reference

PROMPTS = (
    "Tom has 3 boxes with 8 pencils each. He gives 5 pencils away. How many are left?",
    'def is_even(number: int) -> bool:\n    """Whether the number is even."""\n',
    "Write a short story about a lighthouse.",
    "Summarize: The town council met on Monday to talk about the old bridge. It will be closed until spring.",
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The embedded model in float32."""
    return Engine.from_pretrained("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    """What `generate` says."""
    eos = engine.model.base.generation_config.eos_token_id
    return [reference(engine.model.base, prompt_ids(engine, prompt), 48, eos) for prompt in PROMPTS]


def prompt_ids(engine, prompt) -> list[int]:
    return engine.encode([{"role": "user", "content": prompt}])


@pytest.mark.parametrize("method", LOSSLESS_METHODS)
@pytest.mark.parametrize("batch", [1, 4])
def test_every_method_says_what_generate_says(engine, expected, method, batch):
    by_method = Engine(engine.model, engine.tokenizer, method=method, max_num_seqs=batch)
    prompts = [prompt_ids(engine, prompt) for prompt in PROMPTS]
    completions = by_method.generate(prompts, SamplingParams(max_new_tokens=48))
    assert [completion.token_ids for completion in completions] == expected
    if method != "autoregressive":
        # A head that was never trained, or not loaded, agrees on 5 to 7 % of tokens.
        target = by_method.stats.levels["target"]
        assert target.accepted_per_position[0] > 0.15 * target.drafted_per_position[0]


def test_a_seed_gives_one_text_by_every_method(engine):
    texts = []
    for method in LOSSLESS_METHODS:
        by_method = Engine(engine.model, engine.tokenizer, method=method, max_num_seqs=2)
        params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
        prompts = [prompt_ids(engine, prompt) for prompt in PROMPTS[:2]]
        texts.append([completion.text for completion in by_method.generate(prompts, params)])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_says_one_text_by_every_method_and_length(engine, expected, dtype):
    if dtype != "float32":
        engine = Engine.from_pretrained("smollm2", dtype=dtype)
    prompts = [prompt_ids(engine, prompt) for prompt in PROMPTS[:2]]
    texts = []
    for options in (
        {"method": "autoregressive", "max_num_seqs": 1},
        {"method": "single-layer", "num_draft_tokens": 4, "max_num_seqs": 2},
        {"method": "hispec", "num_draft_tokens": 1, "max_num_seqs": 2, "max_prefill_tokens": 20},
        {"method": "hispec", "num_draft_tokens": 3, "num_blocks": 12},
    ):
        exact = Engine(engine.model, engine.tokenizer, exact=True, **options)
        completions = exact.generate(prompts, SamplingParams(max_new_tokens=48))
        texts.append([completion.token_ids for completion in completions])
    assert all(text == texts[0] for text in texts)
    if dtype == "float32":
        assert texts[0] == expected[:2]
