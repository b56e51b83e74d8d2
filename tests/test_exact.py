"""Exact mode: the same bits whatever is computed beside them, by whatever method, or a clear refusal."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hispec.heads import EarlyExitModel, row_invariance
from hispec.heads.product import Product
from hispec.heads.row_invariance import RowByRow, TiledProduct
from hispec.infer import Engine, SamplingParams
from hispec.infer.exact_attention import exact_attention

from .models import ARCHITECTURE_NAMES, build_base, build_heads, reference, shallow

DTYPES = [torch.float32, torch.bfloat16]
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in (5, 1, 21, 40, 8)]


def build(architecture: str, dtype: torch.dtype, **changes: object) -> EarlyExitModel:
    base = shallow(build_base(architecture, **changes), 5)  # some drafts are right, some wrong
    return build_heads(base.to(dtype), "random", committed_context=True)


class Watch:
    """The target's rows of logits by the tokens that they follow; each must be the same to the bit every time."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.num_again = 0
        self.num_different = 0

    def follow(self, engine: Engine) -> Engine:
        runner = engine._hierarchy._runner
        score = runner.score

        def watched(index, sequences, starts):
            logits = score(index, sequences, starts)
            if runner.levels[index].head is None:
                rows = iter(logits)
                for sequence, start in zip(sequences, starts, strict=True):
                    known = sequence.known_ids(0)
                    for position in range(start, len(known)):
                        self.compare(tuple(known[: position + 1]), next(rows))
            return logits

        runner.score = watched
        return engine

    def compare(self, prefix, row):
        self.num_again += prefix in self.rows
        self.num_different += not torch.equal(self.rows.setdefault(prefix, row.clone()), row)


WAYS = (
    {"method": "autoregressive", "max_num_seqs": 1},
    {"method": "hispec", "num_draft_tokens": 3},
    {"method": "hispec", "num_draft_tokens": 1, "num_provisional_tokens": 6, "max_num_seqs": 1},
    {"method": "single-layer", "num_draft_tokens": 5, "max_num_seqs": 2, "max_prefill_tokens": 7},
    {"method": "hispec", "num_blocks": 14, "block_size": 4},  # too few for all at once
)


def check_ways(model: EarlyExitModel, ways, prompts, number: int) -> None:
    params = SamplingParams(max_new_tokens=number, ignore_eos=True)
    watch, texts = Watch(), []
    for options in ways:
        engine = watch.follow(Engine(model, exact=True, **({"num_blocks": 64} | options)))
        texts.append([completion.token_ids for completion in engine.generate(prompts, params)])
        if engine.config.num_blocks == 14:
            assert engine.stats.num_prefills > len(prompts)
    assert all(text == texts[0] for text in texts)
    assert watch.num_again > len(prompts) * number / 2
    assert watch.num_different == 0
    if model.backbone.dtype == torch.float32:
        assert texts[0] == [reference(model.base, prompt, number) for prompt in prompts]


# Experts are chosen by row, and GPT-2 has a kind of linear layer of its own.
REFUSED = {"mixtral", "qwen3-moe", "gpt2"}


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURE_NAMES if name not in REFUSED])
def test_every_architecture(architecture):
    for dtype in DTYPES:
        check_ways(build(architecture, dtype), WAYS[:2], PROMPTS[2:4], 5)


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_what_cannot_be_exact_is_refused(architecture):
    model = build_heads(build_base(architecture), "good")
    with pytest.raises(ValueError, match=r"cannot serve this model: its \w+ computes with weights that are not plain"):
        Engine(model, exact=True, num_blocks=64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_method_length_batch_chunk_and_preemption(dtype):
    check_ways(build("llama", dtype), WAYS, PROMPTS, 10)


def test_an_activation_of_odd_size():
    # Where several rows are computed at once, the last elements of all together go another way.
    check_ways(build("opt", torch.float32, activation_function="silu", ffn_dim=37), WAYS[:2], PROMPTS[:3], 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seed_is_one_text_in_any_company(dtype):
    model = build("llama", dtype)
    seeded = SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    others = [
        SamplingParams(max_new_tokens=9, ignore_eos=True),
        SamplingParams(max_new_tokens=12, temperature=1.5, top_k=3, ignore_eos=True),
    ]
    watch, texts = Watch(), []
    for method in ("autoregressive", "single-layer", "hispec"):
        for company in ([], others):
            engine = watch.follow(Engine(model, method=method, num_blocks=64, exact=True))
            params = [*company, seeded]
            texts.append(engine.generate(PROMPTS[-len(params) :], params)[-1].token_ids)
    assert all(text == texts[0] for text in texts)
    assert watch.num_different == 0


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_is_sampled_by_itself(base, exact):
    read = Engine(build_heads(base, "good"), exact=exact, num_blocks=8)._hierarchy._read
    logits = 3 * torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    each = [SamplingParams(temperature=temperature, top_k=k) for temperature, k in ((0.7, 0), (1, 5), (2, 0))]
    sequences = [SimpleNamespace(params=params, uses_rejection=True, logits_processor=None) for params in each]
    together = read(logits, sequences, [(0, 1)] * 3)
    alone = [read(logits[b : b + 1], sequences[b : b + 1], [(0, 1)])[0] for b in range(3)]
    assert all(torch.equal(*(rows.probs for rows in pair)) for pair in zip(together, alone, strict=True)) == exact


def test_engines_of_one_model_do_not_touch_each_other(base):
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    options = {"method": "single-layer", "num_blocks": 64, "pack_weights": False}
    models = [build_heads(base, "random", committed_context=True) for _ in range(2)]
    untouched, plain, exact = Watch(), Watch(), Watch()
    untouched.follow(Engine(models[0], **options)).generate(PROMPTS, params)
    exact_engine = exact.follow(Engine(models[1], exact=True, **options))
    exact_engine.generate(PROMPTS, params)
    plain_engine = plain.follow(Engine(models[1], **options))
    assert exact_engine.model is plain_engine.model is models[1]
    for prompt in PROMPTS:
        plain_engine.add_request(prompt, params)
        exact_engine.add_request(prompt, params)
    while plain_engine.has_unfinished or exact_engine.has_unfinished:
        plain_engine.step()
        exact_engine.step()
    assert plain.rows.keys() == untouched.rows.keys()
    assert all(torch.equal(plain.rows[prefix], row) for prefix, row in untouched.rows.items())
    # Not even where another engine packs what they share.
    Engine(models[1], pack_weights=True, num_blocks=64).generate(PROMPTS, params)
    num_before = exact.num_again
    exact_engine.generate(PROMPTS, params)
    assert exact.num_again > num_before
    assert exact.num_different == 0


def test_it_follows_weights_that_change(base):
    base = copy.deepcopy(base)
    engine = Engine(build_heads(base, "good", draft_vocab_size=32), num_blocks=64, exact=True, pack_weights=True)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine.generate(PROMPTS, params)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(0.9)
    texts = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
    assert texts == [reference(base, prompt, 8) for prompt in PROMPTS]


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    num_keys=st.integers(1, 90),
    head_dim=st.sampled_from([8, 24, 64]),
    # In float64 nothing is rounded at the end: an inexact sum anywhere would be seen.
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    is_capped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_sums_in_any_order(num_rows, num_keys, head_dim, dtype, is_capped, seed):
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (
        (torch.randn(1, 2, rows, head_dim, generator=generator) * scale).to(dtype)
        for rows, scale in ((num_rows, 3), (num_keys, 3), (num_keys, 100))
    )
    keys[:, :, 0] = 0  # a key may be all zeros
    mask = torch.rand(1, 1, num_rows, num_keys, generator=generator) < 0.7
    mask[..., 0] = True
    options = {"scaling": head_dim**-0.5, "softcap": 20.0 if is_capped else None}
    output = exact_attention(query, keys, values, mask, **options)
    # Keys in another order, and more of them that no query sees.
    order = torch.randperm(num_keys, generator=generator)
    more = [torch.cat([each[:, :, order], each * 1000], dim=2) for each in (keys, values)]
    shuffled = torch.cat([mask[..., order], torch.zeros_like(mask)], dim=-1)
    assert torch.equal(output, exact_attention(query, *more, shuffled, **options))
    # Each query by itself over the keys that it sees.
    for row in range(num_rows):
        seen = mask[0, 0, row]
        alone = exact_attention(query[:, :, row : row + 1], keys[:, :, seen], values[:, :, seen], None, **options)
        assert torch.equal(alone, output[:, :, row : row + 1])
    scores = query.double() @ keys.double().mT * options["scaling"]
    scores = 20 * torch.tanh(scores / 20) if is_capped else scores
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values.double()
    tolerance = {"rtol": 1e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
    torch.testing.assert_close(output.double(), expected, **tolerance)


def test_attention_of_many_queries_is_computed_in_parts(monkeypatch):
    query, keys = torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    mask = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, 1, 30, 30)
    expected = exact_attention(query, keys, keys, mask, scaling=0.3, softcap=None)
    monkeypatch.setattr("hispec.infer.exact_attention.MAX_SCORES", 1000)
    assert torch.equal(exact_attention(query, keys, keys, mask, scaling=0.3, softcap=None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("num_outputs", "size"), [(96, 32), (33, 7), (576, 1536)])
def test_a_tiled_product_is_the_product_row_by_row(dtype, is_packed, num_outputs, size):
    generator = torch.Generator().manual_seed(1)
    weight, hidden = (torch.randn(rows, size, generator=generator).to(dtype) for rows in (num_outputs, 150))
    product = Product(weight, weight[:, 0].clone())
    if is_packed:
        product.pack()
    tiled = TiledProduct(product)
    assert tiled.is_invariant()
    output = tiled(hidden)
    torch.testing.assert_close(output, nn.functional.linear(hidden, weight, product.bias), rtol=1e-2, atol=1e-2)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 63), slice(60, 71), slice(149, 150)):
        assert torch.equal(tiled(hidden[rows]), output[rows])
    assert torch.equal(tiled(hidden.view(2, 75, size)), output.view(2, 75, -1))


def test_an_activation_sees_one_row_at_a_time():
    hidden = torch.randn(1, 40, 37, generator=torch.Generator().manual_seed(0))
    by_row = RowByRow(nn.SiLU())
    assert by_row(hidden).shape == hidden.shape
    assert all(torch.equal(by_row(hidden)[:, row], by_row(hidden[:, row : row + 1])[:, 0]) for row in range(40))
    torch.testing.assert_close(by_row(hidden), nn.functional.silu(hidden))


class OtherLinear(nn.Linear):
    """Not computed as a plain linear layer, for all that is known."""


def test_a_product_that_depends_on_the_number_of_rows_is_refused(base, monkeypatch, without_kernels):
    # Two rows at once are another sum than four: a deliberately wrong kernel.
    by_kernel = Product.by_kernel

    def by_pairs(self, hidden, *, packed):
        if len(hidden) > 4:
            return by_kernel(self, hidden, packed=packed)
        half = hidden.shape[-1] // 2
        return nn.functional.linear(hidden[..., :half], self.weight[:, :half]) + nn.functional.linear(
            hidden[..., half:], self.weight[:, half:], self.bias
        )

    model = build_heads(base, "good")
    monkeypatch.setattr(Product, "by_kernel", by_pairs)
    with pytest.raises(ValueError, match=r"not possible on this cpu in float32: the product with a \d+x\d+ matrix"):
        Engine(model, exact=True, num_blocks=64)


def test_a_row_alone_is_refused_where_the_library_computes_it_otherwise(monkeypatch, without_kernels):
    weight = torch.randn(576, 1536, generator=torch.Generator().manual_seed(0))
    tiled = TiledProduct(Product(weight))
    by_kernel = Product.by_kernel
    rows = [by_kernel(Product(weight), weight[:count], packed=False)[:1] for count in (1, 4)]
    if torch.equal(*rows):
        pytest.skip("on this machine one row is computed as four are")
    monkeypatch.setattr(row_invariance, "ROW_COUNTS", (1, *row_invariance.ROW_COUNTS))
    assert not tiled.is_invariant()


def test_layers_that_depend_on_the_number_of_rows_are_refused(base):
    base = copy.deepcopy(base)
    model = build_heads(base, "good")
    norm = base.model.layers[-1].input_layernorm
    norm.register_forward_hook(lambda module, inputs, output: output * (1 + 1e-5 * inputs[0].shape[-2]))
    Engine(model, num_blocks=64)
    with pytest.raises(ValueError, match="layers of this model read a text in pieces otherwise than at once"):
        Engine(model, exact=True, num_blocks=64)


def test_weights_that_cannot_be_put_in_tiles_are_refused(base):
    base = copy.deepcopy(base)
    other = OtherLinear(64, 32, bias=False)
    base.model.layers[2].mlp.down_proj = other
    with pytest.raises(ValueError, match="its OtherLinear is no plain linear layer, but adapted or quantised"):
        Engine(build_heads(base, "good"), exact=True, num_blocks=64)
