"""Several steps of our own kernels in one call give what they give one by one, and what the library gives."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.heads import KERNEL_DTYPES, Backbone, EarlyExitModel, StateRows, find_kernels, highest_step, run_native
from hispec.heads.rotary import FIRST_LENGTH, RotaryTable
from hispec.heads.state_rows import JoinedRows
from hispec.infer import Engine, SamplingParams, step_chains
from hispec.infer.attention import PagedAttention, Span
from hispec.infer.hierarchy import Hierarchy
from hispec.infer.kv_cache import KVCache
from hispec.infer.model_runner import ModelRunner
from hispec.infer.step_chains import StepChains

from .models import build_base, build_heads, reference, shallow
from .test_kernels import close

needs_kernels = pytest.mark.skipif(find_kernels() is None, reason="this machine cannot compile the kernels")
LENGTH = 9


def attention(backbone, num_layers, length=LENGTH):
    """Of a text from its beginning, over a cache of its own."""
    shape = (backbone.num_kv_heads, backbone.head_dim, backbone.dtype, backbone.device)
    return PagedAttention(KVCache(num_layers, 4, 4, *shape), [Span([2, 0, 3], 0, length)], backbone.device)


@needs_kernels
@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    size=st.integers(1, 150),
    kind=st.sampled_from(["any", "equal", "nan", "infinite", "lowest"]),
    dtype=st.sampled_from(KERNEL_DTYPES),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_the_highest_logits_are_those_of_torch(num_rows, size, kind, dtype, seed):
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 4
    place = seed % size
    if kind == "equal":
        logits = logits.round()
    elif kind == "nan":
        logits[0, place] = math.nan
    elif kind == "infinite":
        logits[0, place] = math.inf
    elif kind == "lowest":
        logits[0] = -math.inf
    logits, names = logits.to(dtype), torch.arange(size) * 3 + 1
    ids, values, probabilities = run_native(highest_step(logits, names, with_probabilities=True))
    expected = logits.max(-1)
    is_number = ~expected.values.isnan()
    assert torch.equal(values.isnan(), ~is_number)
    assert torch.equal(ids[is_number], names[expected.indices[is_number]])
    assert torch.equal(values[is_number], expected.values[is_number].float())
    even = torch.where(expected.values.isfinite().unsqueeze(-1), logits, 0)
    torch.testing.assert_close(probabilities, even.float().softmax(-1).amax(-1), rtol=1e-4, atol=1e-6)
    assert highest_step(logits, None, with_probabilities=False).output.probabilities is None


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@torch.inference_mode()
def test_layers_read_rows_where_they_lie_and_leave_them_where_they_are_kept(dtype):
    backbone = Backbone(build_base("qwen3").to(dtype))
    positions, ids = torch.arange(LENGTH), torch.randint(3, 60, (LENGTH,))
    places = torch.randperm(20)[:LENGTH]
    tables = [torch.full((20, backbone.hidden_size), math.nan, dtype=dtype) for _ in range(2)]
    keeps = [StateRows(table, places) for table in tables]
    lying = backbone.embedded(ids, positions)
    assert isinstance(lying, StateRows)
    found = backbone.run_through(lying, 0, [0, 6], positions, attention(backbone, 6), norms=True, keeps=keeps)
    hidden = backbone.embed(ids, positions)
    assert torch.equal(found[0], hidden)
    close(found[1], backbone.parts.final_norm(backbone.run_layers(hidden, 0, 6, positions, attention(backbone, 6))))
    for states, table in zip(found, tables, strict=True):
        assert torch.equal(table[places], states[0])
        assert table.isnan().all(-1).sum() == 20 - LENGTH


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@torch.inference_mode()
def test_a_heads_first_product_is_part_of_its_step(dtype):
    model = EarlyExitModel.from_base(build_base("llama").to(dtype), (2,), head="block", committed_context=True)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    (head,), backbone, positions = model.exit_heads, model.backbone, torch.arange(LENGTH)
    hidden, context = (
        StateRows((torch.randn(30, backbone.hidden_size) * scale).to(dtype), torch.randperm(30)[:LENGTH])
        for scale in (1.0, 0.03)  # so small that what a norm adds to their squares is seen
    )
    native = head.step(hidden, context, positions, attention(backbone, 7))
    assert native is not None
    found = run_native(native)
    close(found, head(hidden.states(), context.states(), positions, attention(backbone, 7)))
    # Keys and values alone are those that it keeps when it computes all.
    attends = [attention(backbone, 7) for _ in range(2)]
    for attend in attends:
        for pool in (*attend._kv_cache.keys, *attend._kv_cache.values):
            pool.zero_()
    run_native(head.step(hidden, context, positions, attends[0]))
    run_native(head.step(hidden, context, positions, attends[1], keeps_only=True))
    for name in ("keys", "values"):
        whole, alone = (getattr(attend._kv_cache, name)[head.kv_layer] for attend in attends)
        assert torch.equal(whole, alone)
        assert whole.any()
    joined = JoinedRows(hidden, context, head._by_fuse)
    assert joined.num_rows == LENGTH
    assert joined.states().shape == (1, LENGTH, backbone.hidden_size)


@needs_kernels
@pytest.mark.parametrize("place", [-1, 64])
@torch.inference_mode()
def test_a_row_that_is_not_there_is_an_error(place):
    backbone = Backbone(build_base("llama"))
    positions = torch.arange(3)
    lying = backbone.embedded(torch.tensor([5, place, 6]), positions)
    with pytest.raises(IndexError, match="outside of its table"):
        backbone.run_layers(lying, 0, 2, positions, attention(backbone, 6, 3))


@torch.no_grad()
def test_a_table_turns_as_the_library_does():
    base = build_base("llama")
    embedding, table = base.model.rotary_emb, RotaryTable(base.model.rotary_emb)
    assert RotaryTable.serves(embedding)
    for dtype, last in types_and_lengths():
        positions = torch.tensor([0, last, last // 2])
        like = torch.zeros(1, 3, 8, dtype=dtype)
        heads = torch.randn(3, 2, embedding.inv_freq.numel() * 2).to(dtype)
        rotary = table(like, positions, last + 1)
        cos, sin = (each.transpose(0, 1) for each in embedding(like, position_ids=positions.unsqueeze(0)))
        half = heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        assert torch.equal(rotary.turn(heads), heads * cos + turned * sin)
    # Whoever changes the frequencies is followed.
    embedding.inv_freq.div_(2)
    cos = embedding(like, position_ids=positions.unsqueeze(0))[0]
    assert torch.equal(table(like, positions, last + 1).cos[positions, 0], cos[0])


def types_and_lengths():
    """Types and last positions, so that the table grows, shrinks in need, and changes its type."""
    return [
        (torch.float32, 5),
        (torch.float32, FIRST_LENGTH - 1),
        (torch.float32, FIRST_LENGTH),
        (torch.bfloat16, 3 * FIRST_LENGTH),
        (torch.float32, 7),
    ]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_text_are_not_looked_up(rope_type):
    embedding = torch.nn.Module()
    embedding.rope_type = rope_type
    assert not RotaryTable.serves(embedding)
    assert not RotaryTable.serves(None)


@needs_kernels
@pytest.mark.parametrize("change", ["written", "put in its place", "another type and back"])
def test_an_engine_follows_weights_between_requests(change):
    base = build_base("llama").to(torch.bfloat16)
    model = EarlyExitModel.from_configs(base, [])
    engine = Engine(model, method="autoregressive", num_blocks=40, pack_weights=True)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
    prompt = [5, 6, 7]
    found = []
    for _ in range(2):
        (completion,) = engine.generate([prompt], params)
        (expected,) = Engine(
            EarlyExitModel.from_configs(base, []), method="autoregressive", num_blocks=40, pack_weights=True
        ).generate([prompt], params)
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == expected.logprobs
        found.append([each.logprob for each in completion.logprobs])
        layer = base.model.layers[1]
        with torch.no_grad():
            for parameter in (layer.input_layernorm.weight, layer.mlp.down_proj.weight, layer.self_attn.q_proj.weight):
                if change == "written":
                    parameter.mul_(1.5)
                elif change == "put in its place":
                    parameter.data = parameter.data * 1.5
            if change == "another type and back":
                base.float()
                layer.input_layernorm.weight.mul_(1.5)
                base.bfloat16()
    assert found[0] != found[1]


@needs_kernels
def test_an_embedding_that_computes_something_else_is_asked():
    base = build_base("llama")
    model = EarlyExitModel.from_configs(base, [])
    ids, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    assert isinstance(model.backbone.embedded(ids, positions), StateRows)
    embedding = base.get_input_embeddings()
    forward = embedding.forward
    embedding.forward = lambda ids: forward(ids) * 2
    assert torch.equal(model.backbone.embedded(ids, positions), model.backbone.embed(ids, positions))
    del embedding.forward
    hook = embedding.register_forward_hook(lambda module, arguments, states: states * 2)
    assert not isinstance(model.backbone.embedded(ids, positions), StateRows)
    hook.remove()


def prompts_of(number):
    generator = random.Random(number)
    return [[generator.randint(3, 60) for _ in range(generator.randint(1, 30))] for _ in range(4)]


LONE = {"max_num_seqs": 1, "block_size": 2, "num_blocks": 60}


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_policy": "dynamic"},
        {"num_blocks": 28},
        LONE | {"num_draft_tokens": 5},
        LONE | {"draft_policy": "dynamic", "min_confidence": 0.15, "num_draft_tokens": 6},
    ],
    ids=["batch", "batch by confidence", "preempted", "lone", "lone by confidence"],
)
@pytest.mark.parametrize("method", ["single-layer", "hispec"])
def test_drafts_and_verifications_at_once_are_those_step_by_step(monkeypatch, method, options):
    model = build_heads(shallow(build_base("llama"), 4), "random", (0, 3), committed_context=True, draft_vocab_size=48)
    found, drafts, judged = [], [], []
    draft_at_once, judge_at_once = ModelRunner.draft_at_once, ModelRunner._judge_at_once

    def counted(into, run):
        def count(*arguments, **options):
            made = run(*arguments, **options)
            if made is not None:
                into.append(made)
            return made

        return count

    verify_rows = Hierarchy._verify_rows

    def watched(self, sequences, drafts, rows):
        seen.append([[proposal.token_id for proposal in draft] for draft in drafts])
        return verify_rows(self, sequences, drafts, rows)

    monkeypatch.setattr(Hierarchy, "_verify_rows", watched)
    for at_once in (True, False):
        seen: list = []
        nothing = lambda *arguments, **options: None  # noqa: E731
        monkeypatch.setattr(ModelRunner, "draft_at_once", counted(drafts, draft_at_once) if at_once else nothing)
        monkeypatch.setattr(ModelRunner, "_judge_at_once", counted(judged, judge_at_once) if at_once else nothing)
        engine = Engine(model, **{"method": method, "num_draft_tokens": 3, "num_blocks": 200} | options)
        completions = engine.generate(prompts_of(3), SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=2))
        levels = {name: vars(level) | {"seconds": 0} for name, level in engine.stats.levels.items()}
        found.append(([completion.token_ids for completion in completions], seen, levels, engine.stats.num_prefills))
        for completion in completions:
            assert all(level.seconds > 0 for level in completion.stats.levels.values())
    assert found[0] == found[1]
    # Now and then there are more rows than kernels take of such weights.
    with_judgement = sum(draft.judged is not None for draft in drafts)
    by_confidence = "draft_policy" in options
    if method == "single-layer" and (not by_confidence or options.get("num_draft_tokens") == 6):
        assert with_judgement >= len(drafts) / 2 >= 3
        assert with_judgement + len(judged) == engine.stats.levels["target"].num_rounds or "max_num_seqs" not in options
    else:
        assert with_judgement == 0
        assert len(judged) >= 3
    if options.get("num_draft_tokens") == 6 and method == "single-layer":
        assert len({len(draft.token_ids[0]) for draft in drafts}) > 2


@needs_kernels
def test_chains_that_are_not_kept_give_the_same(monkeypatch):
    model = build_heads(shallow(build_base("llama"), 4), "random", (0,), committed_context=True)
    texts = []
    for number in (step_chains.MAX_KEPT_ROWS, 12):
        monkeypatch.setattr(step_chains, "MAX_KEPT_ROWS", number)
        engine = Engine(model, method="single-layer", num_draft_tokens=3, ngram_drafts=True, **LONE)
        texts.append(engine.generate(prompts_of(5), SamplingParams(max_new_tokens=30, ignore_eos=True)))
        kept = engine._runner._chains._recorded.values()
        assert sum(chain.num_rows for chain in kept) <= number
        assert (len(kept) > 4) == (number > 12)
    ids = [[completion.token_ids for completion in each] for each in texts]
    assert ids[0] == ids[1]
    assert len({tuple(each) for each in ids[0]}) > 1


@needs_kernels
@pytest.mark.parametrize("part", ["base", "head", "embedding"])
def test_recorded_chains_follow_weights_between_requests(part):
    base = shallow(build_base("llama"), 4).to(torch.bfloat16)
    model = build_heads(base, "random", (2,), committed_context=True)
    options = {"method": "single-layer", "num_draft_tokens": 3, "pack_weights": True} | LONE
    engine = Engine(model, **options)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    found = []
    for _ in range(2):
        (completion,), (expected,) = (each.generate([[5, 6, 7]], params) for each in (engine, Engine(model, **options)))
        assert completion.token_ids == expected.token_ids
        assert completion.stats.levels["target"].num_accepted == expected.stats.levels["target"].num_accepted
        found.append((completion.token_ids, completion.stats.levels["target"].num_accepted))
        weights = {
            "base": base.model.layers[3].mlp.down_proj.weight,
            "head": model.heads[0].block.mlp.down_proj.weight,
            "embedding": base.model.embed_tokens.weight,
        }
        with torch.no_grad():
            weights[part].copy_(torch.randn_like(weights[part]))
    assert found[0] != found[1]


@needs_kernels
@pytest.mark.parametrize("method", ["autoregressive", "single-layer"])
def test_nothing_is_recorded_of_an_embedding_that_computes_something_else(method):
    """It would have read other tokens than those of the round."""
    base = shallow(build_base("llama"), 4)
    model = build_heads(base, "random", (2,), committed_context=True)
    hook = base.get_input_embeddings().register_forward_hook(lambda module, arguments, states: states * 2)
    expected = [reference(base, prompt, 20) for prompt in prompts_of(3)]
    engine = Engine(model, method=method, num_blocks=200)
    completions = engine.generate(prompts_of(3), SamplingParams(max_new_tokens=20, ignore_eos=True))
    hook.remove()
    assert [completion.token_ids for completion in completions] == expected
    assert {levels for levels, *_ in engine._runner._chains._recorded} <= {range(1, 2)}


@needs_kernels
def test_nothing_is_recorded_of_frequencies_that_depend_on_the_text(monkeypatch):
    monkeypatch.setattr(RotaryTable, "serves", staticmethod(lambda embedding: False))
    base = build_base("llama")
    engine = Engine(build_heads(base, "random", (2,)), method="single-layer", num_blocks=200)
    assert engine._runner._chains is None
    completions = engine.generate(prompts_of(3), SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [c.token_ids for c in completions] == [reference(base, prompt, 20) for prompt in prompts_of(3)]


@needs_kernels
def test_drafts_are_at_once_where_the_verification_is_too_large(monkeypatch):
    model = build_heads(shallow(build_base("llama"), 4), "random", (2,), committed_context=True)
    drafts, draft_at_once = [], ModelRunner.draft_at_once

    def watched(*arguments, **options):
        drafts.append(draft_at_once(*arguments, **options))
        return drafts[-1]

    monkeypatch.setattr(ModelRunner, "draft_at_once", watched)
    for number in (8, 3):  # sequences, of up to 5 rows each; of such weights kernels take 16
        drafts.clear()
        engine = Engine(model, method="single-layer", num_draft_tokens=4, num_blocks=300, max_num_seqs=number)
        prompts = [[5 + place, 6, 7] for place in range(16)]
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert [c.token_ids for c in completions] == [reference(model.base, prompt, 12) for prompt in prompts]
        assert None not in drafts
        whole = [draft for draft in drafts if [len(ids) for ids in draft.token_ids] == [4] * number]
        assert {draft.judged is None for draft in whole} == {number == 8}


@needs_kernels
def test_a_chain_serves_a_text_until_its_table_is_too_narrow(monkeypatch):
    model = build_heads(shallow(build_base("llama"), 4), "random", (2,), committed_context=True)
    widths, record = [], StepChains._record

    def counted(self, rooms, *rest):
        widths.append({room.table_width for room in rooms})
        return record(self, rooms, *rest)

    monkeypatch.setattr(StepChains, "_record", counted)
    engine = Engine(model, method="single-layer", num_draft_tokens=2, max_num_seqs=1, block_size=2, num_blocks=60)
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=90, ignore_eos=True))
    assert completion.token_ids == reference(model.base, [5, 6, 7], 90)
    assert [width for width, _ in itertools.groupby(widths)] == [{8}, {16}, {32}, {64}]
    assert len(widths) < 30
