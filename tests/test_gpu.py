"""On an NVIDIA GPU: the base's own text, by both kinds of attention, by graphs or not. Written without one at hand."""

import pytest
import torch

from hispec.infer import Engine, SamplingParams
from hispec.infer.config import LOSSLESS_METHODS
from hispec.infer.drafter import Drafter
from hispec.infer.recheck import Recheck, recheck

from .models import ARCHITECTURE_NAMES, build_base, build_heads, shallow
from .test_drafter import SAMPLINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PROMPTS = [[3, 4, 5], [9], list(range(3, 43))]


def build(architecture: str, dtype: torch.dtype):
    # Large enough heads for the paged kernel.
    base = build_base(architecture, head_dim=64) if architecture in ("llama", "qwen3") else build_base(architecture)
    return build_heads(shallow(base, 4).to("cuda", dtype), "random", committed_context=True)


@pytest.mark.parametrize("method", LOSSLESS_METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_float32_texts_are_those_of_the_base(architecture, method):
    model = build(architecture, torch.float32)
    engine = Engine(model, method=method, num_draft_tokens=3, num_blocks=64)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for completion in engine.generate(PROMPTS, params):
        result = recheck(model.base, completion.prompt_token_ids, completion.token_ids, params)
        assert result.num_not_chosen == 0 or result.largest_gap < 1e-4


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("method", LOSSLESS_METHODS)
def test_bfloat16_texts_differ_by_near_ties_only(method, block_size):
    model = build("llama", torch.bfloat16)
    engine = Engine(model, method=method, num_draft_tokens=3, num_blocks=16, block_size=block_size)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    total = Recheck()
    for completion in engine.generate(PROMPTS, params):
        total.add(recheck(model.base, completion.prompt_token_ids, completion.token_ids, params))
    assert total.largest_gap < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_mode_keeps_its_promise_or_refuses(dtype):
    model = build("llama", dtype)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    try:
        engines = [Engine(model, method=method, exact=True, num_blocks=64) for method in LOSSLESS_METHODS]
    except ValueError as refusal:
        pytest.skip(str(refusal))
    texts = [[engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS] for engine in engines]
    texts += [[completion.token_ids for completion in engine.generate(PROMPTS, params)] for engine in engines]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_never_waits(monkeypatch, name, dtype):
    """torch itself raises where the host would wait for the GPU."""
    drafts, draw = [], Drafter._draw

    def watched(self, plan, questions):
        drafts.append(plan.nums_active)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return draw(self, plan, questions)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model = build("llama", dtype)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, **SAMPLINGS[name])
    # Once before: kernels are loaded, and graphs recorded, where waiting is fine.
    engine = Engine(model, num_draft_tokens=3, num_blocks=16, block_size=256)
    engine.generate(PROMPTS, params)
    monkeypatch.setattr(Drafter, "_draw", watched)
    engine.generate(PROMPTS, params)
    assert max(map(len, drafts)) == 3


@pytest.mark.parametrize("method", LOSSLESS_METHODS)
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_graphs_change_nothing(caplog, method, max_num_seqs):
    model = build("llama", torch.bfloat16)
    options = {"method": method, "num_draft_tokens": 3, "num_blocks": 16, "block_size": 256}
    try:
        with_graphs = Engine(model, cuda_graphs=True, max_num_seqs=max_num_seqs, **options)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert "cannot be a CUDA graph" not in caplog.text
    without = Engine(model, cuda_graphs=False, max_num_seqs=max_num_seqs, **options)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    total, counts = Recheck(), []
    for engine in (with_graphs, without):
        for completion in engine.generate(PROMPTS, params):
            total.add(recheck(model.base, completion.prompt_token_ids, completion.token_ids, params))
        counts.append(engine.stats.levels["target"].acceptance_rate)
    assert total.largest_gap < 0.25
    # The same drafts, up to near ties.
    assert counts[0] == pytest.approx(counts[1], abs=0.2)
