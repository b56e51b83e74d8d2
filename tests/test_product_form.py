"""Forms of products: which is taken is timed, and remembered by machine; what comes out does not depend on it."""

import json

import pytest
import torch
from torch.nn import functional as F

import hispec.heads.product_trial as trial
from hispec.heads import FormTable, measure_forms, possible_forms
from hispec.heads.product import Product, can_pack
from hispec.heads.product_form import guessed_forms
from hispec.heads.product_trial import choose_form
from hispec.infer import Engine, SamplingParams
from hispec.infer.forms_file import use_measured_forms

from .models import build_heads


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_product(dtype, *, packs, released=False):
    weight = make(6, 5, dtype=torch.bfloat16 if released else dtype, seed=1).to(dtype)
    product = Product(weight, make(6, dtype=dtype, seed=2))
    if packs:
        product.pack()
    return product


PACKINGS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "packs"), PACKINGS)
@torch.no_grad()
def test_every_form_is_the_product(dtype, packs):
    product = make_product(dtype, packs=packs)
    for num_rows in (1, 2, 3, 9, 70):
        hidden = make(1, num_rows, 5, dtype=dtype)
        expected = F.linear(hidden, product.weight, product.bias)
        for form in possible_forms(product.kind, num_rows):
            output = product.by_form(hidden, form)
            assert output.shape == expected.shape
            torch.testing.assert_close(output, expected)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this machine has no packed bfloat16 product")
@torch.no_grad()
def test_in_16_bits_every_form_of_the_library_has_the_bits_of_the_usual_one():
    size = 1536
    product = Product(make(3072, size, dtype=torch.bfloat16, seed=1))
    product.pack()
    # Another order of summation shows in one of some thousand numbers.
    for seed, num_rows in enumerate((*[1] * 12, 2, 2, 3, 8, 32, 64)):
        hidden = make(num_rows, size, dtype=torch.bfloat16, seed=seed)
        for form in set(possible_forms(product.kind, num_rows)) - {"native"}:
            assert torch.equal(product.by_form(hidden, form), F.linear(hidden, product.weight)), (num_rows, form)


def test_guessed_forms_are_possible_and_a_half_weight_has_but_one():
    for dtype, packs in (*PACKINGS, (torch.bfloat16, False), (torch.float64, True)):
        kind = make_product(dtype, packs=packs).kind
        assert all(guessed_forms(kind).form(rows) in possible_forms(kind, rows) for rows in range(1, 80))
    half = make_product(torch.float32, packs=True, released=True)
    if half.packing == "half":
        assert {possible_forms(half.kind, rows) for rows in range(1, 65)} == {("packed",)}


@pytest.mark.parametrize(("dtype", "packs"), PACKINGS)
@torch.no_grad()
def test_where_nothing_is_clearly_faster_the_guess_stands_for_every_number_of_rows(dtype, packs, monkeypatch):
    monkeypatch.setattr(trial, "MIN_BYTES", 0)
    monkeypatch.setattr(trial, "_seconds", lambda products, what: 1.0)
    product = make_product(dtype, packs=packs)
    guess = guessed_forms(product.kind)
    if len(possible_forms(product.kind, 1)) == 1:
        assert measure_forms([product]) == {}  # there is nothing to choose
        return
    (table,) = measure_forms([product]).values()
    assert [table.form(rows) for rows in range(1, 100)] == [guess.form(rows) for rows in range(1, 100)]


def test_a_table_holds_from_its_starts_on():
    table = FormTable((1, 2, 9), ("transposed-twice", "packed", "usual"))
    assert [table.form(num_rows) for num_rows in (1, 2, 3, 8, 9, 100)] == [
        *("transposed-twice", "packed", "packed", "packed", "usual", "usual")
    ]


def test_the_guess_stands_against_noise_and_falls_to_what_is_clearly_faster():
    assert choose_form({"usual": 0.9, "packed": 1.0}, "packed") == "packed"
    assert choose_form({"usual": 0.79, "packed": 1.0}, "packed") == "usual"


@torch.no_grad()
def test_a_measured_table_has_the_fastest_form_of_each_number_of_rows(monkeypatch):
    """By a clock that only the forms move."""
    monkeypatch.setattr(trial, "MIN_BYTES", 0)
    now = 0.0

    def by_form(self, hidden, form):
        nonlocal now
        rows = hidden.shape[0]
        now += {"usual": 10, "transposed": 3 if rows < 8 else 30}.get(form, 20)

    monkeypatch.setattr(Product, "by_form", by_form)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now)
    products = [Product(make(6, 5, seed=seed)) for seed in range(3)]
    tables = measure_forms(products)
    assert tables == {products[0].kind: FormTable((1, 8), ("transposed", "usual"))}
    assert not measure_forms([Product(make(6, 5, dtype=torch.bfloat16))])


@pytest.mark.parametrize("packs", [False, True])
@torch.no_grad()
def test_a_product_takes_the_form_that_it_is_told_also_when_its_weight_changes(packs, monkeypatch):
    product = make_product(torch.float32, packs=packs)
    form = "packed-twice" if packs and can_pack(torch.float32) else "transposed"
    product.use_forms({product.kind: FormTable((1, 3), ("usual", form))})
    product.weight.mul_(2)
    if packs:
        product.pack()
    taken = []
    by_form = Product.by_form
    monkeypatch.setattr(
        Product, "by_form", lambda self, hidden, form: taken.append(form) or by_form(self, hidden, form)
    )
    for num_rows in (2, 3):
        hidden = make(num_rows, 5)
        torch.testing.assert_close(product(hidden), F.linear(hidden, product.weight, product.bias))
    assert taken == ["usual", form]


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Products of any size count; how often they are timed."""
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(trial, "MIN_BYTES", 0)
    calls = []
    seconds = trial._seconds
    monkeypatch.setattr(trial, "_seconds", lambda products, what: calls.append(what.kind) or seconds(products, what))
    return calls


def test_a_machine_is_measured_once(base, timed, tmp_path):
    model = build_heads(base, "random", (1, 2))
    use_measured_forms(model)
    kinds = set(timed)
    assert {product.kind for product in model.products()} == kinds
    timed.clear()
    use_measured_forms(build_heads(base, "random", (1, 2)))
    assert not timed
    # A new kind is timed by itself, and what was known stays.
    packed = build_heads(base, "random", (1, 2))
    packed.pack_weights()
    use_measured_forms(packed)
    assert not kinds & set(timed)
    timed.clear()
    use_measured_forms(model)
    use_measured_forms(packed)
    assert not timed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record["tables"][0].update(forms=["magic"] * len(record["tables"][0]["forms"])),
        lambda record: record["tables"][0].update(starts=[0] * len(record["tables"][0]["starts"])),
        lambda record: record["tables"][0].pop("dtype"),
        lambda record: record["key"].update(num_threads=1000),
    ],
)
def test_what_cannot_be_read_is_measured_anew(base, timed, tmp_path, spoil):
    model = build_heads(base, "random", (1, 2))
    use_measured_forms(model)
    (path,) = tmp_path.rglob("*.json")
    record = json.loads(path.read_text())
    spoil(record)
    path.write_text(json.dumps(record))
    timed.clear()
    use_measured_forms(build_heads(base, "random", (1, 2)))
    assert timed


@torch.no_grad()
def test_an_engine_in_any_forms_generates_what_the_base_does(base, timed, monkeypatch):
    """And all of its products are in them, also those that are made anew."""
    prompt = list(range(2, 9))
    expected = base.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    for last in ("usual", "transposed", "transposed-twice"):
        model = build_heads(base, "random", (1, 2), draft_vocab_size=8)
        table = FormTable((1,), (last,))
        told = {product.kind: table for product in model.products()}
        monkeypatch.setattr("hispec.infer.forms_file._read", lambda told=told: told)
        engine = Engine(model, pack_weights=False, num_draft_tokens=3)
        model.refresh_draft_vocab()
        assert all(product._table == table for product in model.products())
        (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert completion.token_ids == expected
    assert not timed


def test_what_runs_in_known_forms_is_not_timed_again_where_nothing_can_be_kept(base, timed, monkeypatch):
    monkeypatch.setattr("hispec.infer.forms_file._write", lambda tables: None)
    model = build_heads(base, "random", (1, 2))
    use_measured_forms(model)
    assert timed
    timed.clear()
    use_measured_forms(model)
    assert not timed


def test_a_base_of_another_type_has_products_of_that_type(make_base):
    model = build_heads(make_base("llama"), "random", (1, 2))
    for product in model.products():
        product.pack()
    hidden = make(3, model.backbone.hidden_size, dtype=torch.bfloat16)
    model.to(torch.bfloat16)
    assert {product.weight.dtype for product in model.products()} == {torch.bfloat16}
    with torch.no_grad():
        for product in model.products():
            if product.weight.shape[1] == hidden.shape[1]:
                torch.testing.assert_close(product(hidden), F.linear(hidden, product.weight, product.bias))
                assert product.kind.packing == ("packed" if can_pack(torch.bfloat16) else "none")
