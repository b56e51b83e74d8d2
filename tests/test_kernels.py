"""Our own kernels compute what the library computes, each row by itself."""

import itertools
import math
import os
import shutil
from functools import partial

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hispec.heads import (
    KERNEL_DTYPES,
    Backbone,
    DenseAttention,
    EarlyExitModel,
    Places,
    cache_folder,
    find_kernels,
    kernel_library,
    kernels,
)
from hispec.heads.block_weight import BlockWeight, block_weight
from hispec.heads.half_weight import half_weight
from hispec.heads.kernels import MAX_ROWS, SWITCH
from hispec.heads.lean_layer import LeanLayer
from hispec.heads.product import Product
from hispec.infer import Engine, SamplingParams
from hispec.infer.attention import PagedAttention, Span
from hispec.infer.kv_cache import KVCache

from .models import build_base, build_heads, reference

pytestmark = pytest.mark.skipif(find_kernels() is None, reason="this machine cannot compile the kernels")
BLOCK_TYPES = {"Q4_0": "four-bit", "Q4_1": "four-bit", "Q8_0": "eight-bit"}
LEAN = ("llama", "mistral", "qwen2", "qwen2-window", "qwen3")


@pytest.fixture(params=["lanes", "tiles"])
def native(request, monkeypatch):
    """The kernels in use, with the machine's tiles and without."""
    monkeypatch.setenv(SWITCH, request.param)
    find_kernels.cache_clear()
    kernels = find_kernels()
    if kernels.uses_tiles != (request.param == "tiles"):
        pytest.skip("this machine has no tiles")
    yield kernels
    find_kernels.cache_clear()


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(kind, *shape, seed=0):
    """Weights as a file of such blocks has them."""
    weight_type = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(make(*shape, seed=seed).numpy(), weight_type)
    return torch.from_numpy(gguf.quants.dequantize(packed, weight_type))


def released(*shape, seed=0):
    """As most checkpoints are: float32 that was bfloat16."""
    return make(*shape, seed=seed).bfloat16().float()


WEIGHTS = {
    "float32": (make, torch.float32, "none"),
    "bfloat16": (partial(make, dtype=torch.bfloat16), torch.bfloat16, "none"),
    "half": (released, torch.float32, "half"),
    **{kind: (partial(quantised, kind), torch.float32, "block") for kind in BLOCK_TYPES},
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (13, 96), (70, 576), (5, 7), (9, 77), (33, 1)])
@torch.inference_mode()
def test_a_product_is_the_product_row_by_row(native, kind, has_bias, shape):
    make_weight, dtype, packing = WEIGHTS[kind]
    num_outputs, size = shape
    if packing == "block" and size % 32:
        return
    weight, bias = make_weight(*shape, seed=1), make(num_outputs, dtype=dtype, seed=2) if has_bias else None
    product = Product(weight, bias)
    if packing != "none":
        product.pack()
        assert product.packing == packing
    linear = product.linear()
    hidden = make(37, size, dtype=dtype, seed=3)
    expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    outputs = native.product(linear, hidden)
    # The rounding of what is kept, and of sums in float32.
    unit = torch.finfo(dtype).eps
    assert ((outputs - expected).abs() <= unit * expected.abs() + size * 2.0**-23 * 4).all()
    for rows in (slice(0, 1), slice(1, 3), slice(2, 5), slice(4, 8), slice(7, 16), slice(5, 22), slice(36, 37)):
        assert torch.equal(native.product(linear, hidden[rows]), outputs[rows])
    assert torch.equal(native.product(linear, hidden[0]), outputs[0])
    assert torch.equal(native.product(linear, hidden.t().contiguous().t()), outputs)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@torch.inference_mode()
def test_a_weight_in_blocks_has_its_values_to_the_bit(native, kind):
    weight = quantised(kind, 40, 96)
    weight[0] = 0
    held = block_weight(weight)
    assert isinstance(held, BlockWeight)
    # One input at a time: nothing is summed.
    assert torch.equal(held(torch.eye(96)).t(), weight)
    assert block_weight(quantised("Q4_1", 4, 32).bfloat16()) is None
    assert block_weight(weight[:, :80].contiguous()) is None


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@torch.inference_mode()
def test_a_weight_that_no_blocks_hold_is_left_as_it_is(native, kind):
    assert block_weight(make(4, 64)) is None
    for row, rounding in ((0, 2.0**-20), (-1, 2.0**-20), (-1, math.nan), (0, math.inf)):
        weight = quantised(kind, 5000, 64)
        weight[row, 7] *= 1 + rounding
        assert block_weight(weight) is None
    product = Product(weight)
    product.pack()
    assert product.packing == "packed"


@given(
    steps=st.lists(st.integers(-8, 7), min_size=32, max_size=32),
    scale=st.floats(-4, 4, width=32) | st.floats(-4, 4, width=16),
    lowest=st.floats(-8, 8, width=32),
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_held_in_blocks_is_held_to_the_bit(steps, scale, lowest):
    numbers = torch.tensor(steps, dtype=torch.float32)
    # The last is made as it is read: from a product that is rounded.
    for weight in (numbers * scale, (numbers + 8) * scale + lowest, (numbers + 8) * scale - 8 * scale):
        held = block_weight(weight.unsqueeze(0))
        with torch.inference_mode():
            assert held is None or torch.equal(held(torch.eye(32)).flatten(), weight)


def close(found, expected):
    unit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=unit, atol=unit * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("architecture", LEAN)
@torch.inference_mode()
def test_a_layer_is_the_librarys(native, architecture, dtype):
    backbone = Backbone(build_base(architecture).to(dtype))
    positions = torch.arange(MAX_ROWS)
    hidden = backbone.embed(torch.arange(3, 3 + MAX_ROWS), positions)
    cos_sin = [backbone._rotary(hidden, positions, layer) for layer in (backbone._runs[0], backbone.layers[0])]
    for index, (lean, layer) in enumerate(zip(backbone._runs, backbone.layers, strict=True)):
        assert isinstance(lean, LeanLayer)
        assert lean.alone.describe(dtype, MAX_ROWS, cos_sin[0]) is not None
        attend = DenseAttention([MAX_ROWS])
        found = lean(hidden, cos_sin[0], attend, index)
        expected = layer(
            hidden, position_ids=positions.unsqueeze(0), attend=attend, kv_layer=index, position_embeddings=cos_sin[1]
        )
        close(found, expected)
        hidden = expected


def cache_and_tables(backbone, lengths, block_size=4):
    """A cache, and blocks for texts of these lengths, one text's between another's."""
    num_blocks = max(-(-length // block_size) for length in lengths)
    tables = [list(range(number, len(lengths) * num_blocks, len(lengths))) for number in range(len(lengths))]
    shape = (backbone.num_kv_heads, backbone.head_dim, backbone.dtype, backbone.device)
    return KVCache(backbone.num_layers, len(lengths) * num_blocks, block_size, *shape), tables


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("architecture", LEAN)
@torch.inference_mode()
def test_a_run_of_layers_with_its_attention_is_the_librarys(native, architecture, dtype):
    backbone, length = Backbone(build_base(architecture).to(dtype)), 15
    positions = torch.arange(length)
    cache, (table,) = cache_and_tables(backbone, [length])
    pools = [*cache.keys, *cache.values]
    for pool in pools:
        pool.fill_(math.nan)
    attend = PagedAttention(cache, [Span(table, 0, length)], backbone.device)
    assert attend.pages is not None
    hidden = one_by_one = expected = backbone.embed(torch.arange(3, 3 + length), positions)
    for index, layer in enumerate(backbone.layers):
        found = backbone.run_layers(expected, index, index + 1, positions, attend)
        cos_sin = backbone._rotary(expected, positions, layer)
        rows = {"position_ids": positions.unsqueeze(0), "position_embeddings": cos_sin}
        expected = layer(expected, attend=DenseAttention([length]), kv_layer=index, **rows)
        close(found, expected)
        one_by_one = backbone.run_layers(one_by_one, index, index + 1, positions, attend)
    assert torch.equal(backbone.run_layers(hidden, 0, backbone.num_layers, positions, attend), one_by_one)
    # What others read of a block is numbers.
    assert not any(pool[length:].any() for pool in pools)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("architecture", LEAN)
@torch.inference_mode()
def test_texts_side_by_side_and_in_pieces_come_out_as_alone_to_the_bit(native, architecture, dtype):
    backbone = Backbone(build_base(architecture).to(dtype))
    lengths = (15, 9)
    ids = torch.randint(3, 60, (2, 15), generator=torch.Generator().manual_seed(5))

    def read(cache, tables, pieces):  # (text, start, stop) each
        spans = [Span(tables[text], start, stop) for text, start, stop in pieces]
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
        attend = PagedAttention(cache, spans, backbone.device)
        hidden = backbone.embed(torch.cat([ids[text, start:stop] for text, start, stop in pieces]), positions)
        hidden = backbone.run_layers(hidden, 0, backbone.num_layers, positions, attend)[0]
        return hidden.split([stop - start for _, start, stop in pieces])

    alone = []
    for text, length in enumerate(lengths):
        (states,) = read(*cache_and_tables(backbone, lengths), [(text, 0, length)])
        alone.append(states)
    cache, tables = cache_and_tables(backbone, lengths)
    for pieces in ([(0, 0, 1), (1, 0, 6)], [(1, 6, 7)], [(0, 1, 4)], [(0, 4, 15), (1, 7, 9)]):
        for (text, start, stop), states in zip(pieces, read(cache, tables, pieces), strict=True):
            assert torch.equal(states, alone[text][start:stop])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 24), (3, 1, 33), (3, 1, 64), (2, 2, 128)]
)
@torch.inference_mode()
def test_attention_over_blocks_is_attention(dtype, window, num_heads, num_kv_heads, head_dim):
    size, tables = 4, torch.tensor([[7, 2, 9, 0], [3, 8, 0, 0]])
    pools = [torch.full((10 * size, num_kv_heads, head_dim), math.nan, dtype=dtype) for _ in range(2)]
    kept = {0: 11, 1: 3}  # positions of each text before its new ones
    new = {0: 4, 1: 2}
    texts = {}
    for text in kept:
        keys, values = (make(kept[text] + new[text], num_kv_heads, head_dim, dtype=dtype, seed=s) for s in (text, 9))
        texts[text] = keys, values
        places = torch.arange(kept[text])
        slots = tables[text][places // size] * size + places % size
        for pool, rows in zip(pools, (keys, values), strict=True):
            pool[slots] = rows[: kept[text]]
    sequences = torch.tensor([text for text in kept for _ in range(new[text])])
    positions = torch.cat([torch.arange(kept[text], kept[text] + new[text]) for text in kept])
    # Queries, keys and values as a layer has them, side by side.
    query = make(len(positions), num_heads, head_dim, dtype=dtype, seed=7)
    key, value = (torch.cat([texts[text][part][kept[text] :] for text in kept]) for part in (0, 1))
    rows = torch.cat([query, key, value], dim=1)
    found = find_kernels().paged_attention(
        *rows.split([num_heads, num_kv_heads, num_kv_heads], dim=1),
        *pools,
        Places.of(sequences, positions, tables, size),
        scaling=0.3,
        window=window,
    )
    for row, (text, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = (
            each[first : position + 1].double().repeat_interleave(num_heads // num_kv_heads, 1) for each in texts[text]
        )
        weights = (torch.einsum("hd,shd->hs", query[row].double(), keys) * 0.3).softmax(-1)
        close(found[row], torch.einsum("hs,shd->hd", weights, values).to(dtype))


@torch.inference_mode()
def test_attention_holds_for_scores_far_apart():
    pools = [torch.zeros(64, 1, 16) for _ in range(2)]
    query, key, value = make(40, 1, 16, seed=1) * 40, make(40, 1, 16, seed=2) * 40, make(40, 1, 16, seed=3)
    places = Places.of(torch.zeros(40, dtype=torch.int64), torch.arange(40), torch.arange(16).unsqueeze(0), 4)
    found = find_kernels().paged_attention(query, key, value, *pools, places, scaling=1.0, window=None)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()).masked_fill(~mask, -math.inf)
    close(found, torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double()).float())


def base_of_weights(make_weight, dtype):
    """A tiny Llama whose layers have such weights."""
    base = build_base("llama", hidden_size=32, intermediate_size=64, num_attention_heads=4).to(dtype)
    with torch.no_grad():
        for seed, module in enumerate(base.model.layers.modules()):
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(make_weight(*module.weight.shape, seed=seed) * 0.125)
    return base


@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_a_layer_follows_its_weights(native, kind):
    make_weight, dtype, packing = WEIGHTS[kind]
    base = base_of_weights(make_weight, dtype)
    model = EarlyExitModel.from_configs(base, [])
    model.pack_weights()
    products = list(model.backbone.products())[:-1]
    assert packing == "none" or {product.packing for product in products} == {packing}
    positions = torch.arange(3)

    def run(backbone):
        hidden = backbone.embed(torch.tensor([5, 6, 7]), positions)
        return backbone.run_layers(hidden, 0, 2, positions, DenseAttention([3]))

    before = run(model.backbone)
    layer = base.model.layers[0]
    # Still held in the same way, and no more.
    for weight, change in itertools.product((layer.mlp.down_proj.weight, layer.self_attn.k_proj.weight), (0.5, 1.01)):
        weight.mul_(change)
        model.follow_tensors()
        after = run(model.backbone)
        assert not torch.equal(before, after)
        close(after, run(Backbone(base)))
        before = after


@pytest.mark.parametrize("kind", WEIGHTS)
def test_texts_are_those_of_the_base(native, kind):
    make_weight, dtype, _ = WEIGHTS[kind]
    base = base_of_weights(make_weight, dtype)
    model = build_heads(base, "random", (1, 2))
    prompts = [[9], list(range(3, 23)), [8, 7, 6]]
    expected = [reference(base, prompt, 12) for prompt in prompts]
    texts = []
    for method in ("autoregressive", "single-layer", "hispec"):
        engine = Engine(model, method=method, num_blocks=60, pack_weights=True)
        found = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        texts.append([list(completion.token_ids) for completion in found])
    if dtype == torch.float32:
        assert texts[0] == expected
    # By kernels alone the texts of all methods are one, in any type.
    assert texts[0] == texts[1] == texts[2]


def test_they_take_rows_without_gradients():
    kernels, hidden = find_kernels(), make(1, MAX_ROWS, 8)
    assert not kernels.takes(hidden)
    with torch.no_grad():
        assert kernels.takes(hidden)
        assert not kernels.takes(hidden.half())
        assert not kernels.takes(hidden.to("meta"))
        assert not kernels.takes(hidden[:, :0])


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Another cache folder, in which nothing is compiled."""
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    return lambda: find_kernels.__wrapped__()


def test_they_are_compiled_once(fresh, tmp_path, monkeypatch):
    before = os.umask(0o002)  # as where every user is a group
    try:
        assert fresh() is not None
    finally:
        os.umask(before)
    (library,) = (tmp_path / "kernels").iterdir()
    assert library.stat().st_mode & 0o777 == 0o755
    monkeypatch.setattr(kernel_library.shutil, "which", lambda name: None)  # where they are only run
    assert fresh() is not None


@pytest.mark.parametrize("what", ["file", "folder", "folder above"])
def test_what_others_could_have_written_is_not_run(fresh, tmp_path, what):
    folder = tmp_path / "kernels"
    shutil.copytree(KEPT, folder)
    assert fresh() is not None
    for path in {"folder": [folder], "folder above": [tmp_path], "file": folder.iterdir()}[what]:
        path.chmod(path.stat().st_mode | 0o002)
    with pytest.warns(UserWarning, match="could be written to by others"):
        assert fresh() is None


def test_a_library_that_is_not_whole_is_made_anew(fresh, tmp_path):
    shutil.copytree(KEPT, tmp_path / "kernels")
    for path in (tmp_path / "kernels").iterdir():
        os.truncate(path, 8192)
    assert fresh() is not None


def test_without_what_it_takes_there_are_none(fresh, monkeypatch):
    def fails(command, **options):
        raise kernel_library.subprocess.CalledProcessError(1, command, stderr=b"no such option\nand more")

    monkeypatch.setattr(kernel_library.subprocess, "run", fails)
    with pytest.warns(UserWarning, match="several times slower: no such option$"):
        assert fresh() is None
    monkeypatch.setattr(kernel_library.shutil, "which", lambda name: None)
    assert fresh() is None


def test_kernels_that_are_wrong_are_not_used(fresh, tmp_path, monkeypatch):
    shutil.copytree(KEPT, tmp_path / "kernels")
    product = kernels.Kernels.product
    monkeypatch.setattr(kernels.Kernels, "product", lambda *args: product(*args) * 1.1)
    with pytest.warns(UserWarning, match="is wrong"):
        assert fresh() is None


def test_they_are_found_whatever_the_default_device(fresh, tmp_path):
    shutil.copytree(KEPT, tmp_path / "kernels")
    with torch.device("meta"):
        assert fresh() is not None


def test_a_switch_leaves_them_out(without_kernels):
    assert find_kernels() is None
    base = build_base("llama")
    engine = Engine(build_heads(base, "random"), method="single-layer", num_blocks=40, pack_weights=True)
    (completion,) = engine.generate([[9, 8, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert list(completion.token_ids) == reference(base, [9, 8, 7], 8)
    assert block_weight(quantised("Q4_1", 4, 32)) is None
    assert half_weight(released(4, 32), rounds=False) is not None or not torch.backends.quantized.supported_engines


def test_linear_keeps_its_tensors():
    weight, bias = make(3, 5), make(3)
    linear = find_kernels().linear(weight, bias)
    assert (linear.weight, linear.bias) == (weight.data_ptr(), bias.data_ptr())
    assert (linear.num_outputs, linear.num_inputs) == (3, 5)
    assert linear.tensors[0] is weight
    assert linear.tensors[1] is bias


@torch.no_grad()
def test_a_product_follows_its_bias(native):
    linear = torch.nn.Linear(64, 32)
    product, hidden = Product(linear.weight, linear.bias), make(2, 64)
    product(hidden)
    linear.bias.data = make(32, seed=5)
    close(product(hidden), linear(hidden))


@torch.no_grad()
def test_what_does_not_fit_is_the_librarys_error():
    product = Product(make(8, 32))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(make(2, 48))
    with pytest.raises(RuntimeError, match="same dtype"):
        Product(make(8, 32).bfloat16())(make(2, 32))


def test_packing_what_is_packed_keeps_the_copies():
    """Another engine may be reading them."""
    model = build_heads(base_of_weights(released, torch.float32), "random", (1, 2))
    model.pack_weights()
    kept = [product._packed for product in model.products()]
    model.pack_weights()
    assert all(product._packed is copy for product, copy in zip(model.products(), kept, strict=True))


@torch.inference_mode()
def test_attention_is_by_kernels_where_all_types_are_one():
    pools = KVCache(1, 4, 4, 1, 8, torch.float32, torch.device("cpu"))
    rows = [make(3, 1, 8, seed=seed) for seed in range(3)]
    span = [Span([2, 0], 0, 3)]
    options = {"scaling": 0.3, "window": None, "softcap": None}
    expected = PagedAttention(pools, span, torch.device("cpu"))(0, *rows, **options)
    rows[2] = rows[2].bfloat16()  # as under autocast
    found = PagedAttention(pools, span, torch.device("cpu"))(0, *rows, **options)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


KEPT = cache_folder() / "kernels"
