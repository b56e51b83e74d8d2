"""Which form of each product is fastest on this machine: all of them timed, by the number of rows."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from .product import Product
from .product_form import MAX_PACKED_ROWS, Form, FormTable, FormTables, ProductKind, guessed_forms, possible_forms

ROW_COUNTS = (1, 2, 3, 4, 8, 9, 17, 32)
"""Numbers of rows that are timed. The form of one holds up to the next, that of the last as far as packed copies serve;
where a guessed form begins is among them."""
MARGIN = 0.8
"""Another form than the guessed one must take at most this share of its time."""
NUM_TURNS = 3
"""Times that every form is timed."""
MIN_BYTES = 2**20
"""Of a weight; smaller ones cost what any call costs, whatever the form."""
WORKING_SET = 2**26
"""Bytes of weights of a kind that are read by turns, so that few are still in a cache."""


class Trial(NamedTuple):
    """One form for one number of rows, and the seconds a product that each of its turns took."""

    kind: ProductKind
    num_rows: int
    form: Form
    seconds: list[float]


@torch.inference_mode()
def measure_forms(products: Iterable[Product], *, show_progress: bool = False) -> FormTables:
    """Time every form of every kind among `products`; about a second for each kind, more for weights of 100 MB.

    Passes over those that are not `is_timed`.
    """
    by_kind: dict[ProductKind, list[Product]] = defaultdict(list)
    for product in products:
        if is_timed(product):
            by_kind[product.kind].append(product)
    trials = [
        Trial(kind, num_rows, form, [])
        for kind in by_kind
        for num_rows in ROW_COUNTS
        for form in possible_forms(kind, num_rows)
    ]
    # Kinds beside each other, so that a lone weight is not read twice in a row.
    trials.sort(key=lambda trial: (trial.num_rows, trial.form))
    # By turns, so that a noisy moment does not fall on one form alone; a first turn warms up.
    num_turns = NUM_TURNS + 1
    with tqdm(total=num_turns * len(trials), desc="products", delay=2, leave=False, disable=not show_progress) as bar:
        for turn in range(num_turns):
            for trial in trials:
                seconds = _seconds(by_kind[trial.kind], trial)
                if turn:
                    trial.seconds.append(seconds)
                bar.update()
    return {kind: _table(kind, trials) for kind in by_kind}


def is_timed(product: Product) -> bool:
    """Whether there is something to choose: `measure_forms` passes over the others."""
    weight = product.weight
    is_large = weight.numel() * weight.element_size() >= MIN_BYTES
    return weight.device.type == "cpu" and is_large and len(possible_forms(product.kind, ROW_COUNTS[-1])) > 1


def _seconds(products: Sequence[Product], trial: Trial) -> float:
    kind = trial.kind
    num_products = max(1, min(len(products), WORKING_SET // (kind.num_outputs * kind.num_inputs * kind.dtype.itemsize)))
    hidden = torch.ones(trial.num_rows, kind.num_inputs, dtype=kind.dtype)
    start = time.perf_counter()
    for product in products[:num_products]:
        product.by_form(hidden, trial.form)
    return (time.perf_counter() - start) / num_products


def _table(kind: ProductKind, trials: Iterable[Trial]) -> FormTable:
    """The fastest forms; equal neighbours are one."""
    guessed = guessed_forms(kind)
    seconds: dict[int, dict[Form, float]] = defaultdict(dict)
    for trial in trials:
        if trial.kind == kind:
            seconds[trial.num_rows][trial.form] = min(trial.seconds)
    starts: list[int] = []
    forms: list[Form] = []
    for num_rows, by_form in seconds.items():
        form = choose_form(by_form, guessed.form(num_rows))
        if not forms or form != forms[-1]:
            starts.append(num_rows)
            forms.append(form)
    if forms[-1] != "usual":
        starts.append(MAX_PACKED_ROWS + 1)
        forms.append("usual")
    return FormTable(tuple(starts), tuple(forms))


def choose_form(seconds: Mapping[Form, float], guessed: Form) -> Form:
    """The fastest, but the guessed one unless another is clearly faster: what is chosen should not change by noise."""
    fastest = min(seconds, key=lambda form: seconds[form])
    return fastest if seconds[fastest] < MARGIN * seconds[guessed] else guessed
