"""The forms of products that were measured, on disk, so that a machine is measured once."""

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from ..checkpoints import write_atomically
from ..heads import EarlyExitModel, FormTable, FormTables, ProductKind, is_timed, measure_forms, possible_forms
from .cost_file import device_key, kept_path

FORMAT_VERSION = 2


def use_measured_forms(model: EarlyExitModel) -> None:
    """Compute the products of `model` in the forms that are fastest here; those of a new kind are timed before."""
    products = [product for product in model.products() if is_timed(product) and product.kind not in model.forms]
    if not products:
        return
    # What an engine over the same model runs by stays, whatever lies on the disk.
    tables = {**_read(), **model.forms}
    if missing := [product for product in products if product.kind not in tables]:
        found = measure_forms(missing, show_progress=True)
        tables |= found
        _write({**_read(), **found})
    model.use_forms(tables)


def _key() -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **device_key(torch.device("cpu"))}


def _read() -> FormTables:
    """What was kept; nothing where nothing readable was."""
    try:
        record = json.loads(kept_path(_key()).read_text(encoding="utf-8"))
        return dict(map(_entry, record["tables"])) if record["key"] == _key() else {}
    # In a container without a home there is no folder for it, which is a RuntimeError.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError):
        return {}


def _write(tables: FormTables) -> None:
    """Keep them; where the disk refuses, they will be measured again."""
    entries = [
        {**kind._asdict(), "dtype": str(kind.dtype).removeprefix("torch."), **table._asdict()}
        for kind, table in tables.items()
    ]
    with suppress(OSError, RuntimeError):
        path = kept_path(_key())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": _key(), "tables": entries}, indent=2) + "\n")


def _entry(values: dict[str, Any]) -> tuple[ProductKind, FormTable]:
    kind = ProductKind(
        int(values["num_outputs"]), int(values["num_inputs"]), getattr(torch, values["dtype"]), values["packing"]
    )
    table = FormTable(tuple(map(int, values["starts"])), tuple(values["forms"]))
    rises = table.starts[:1] == (1,) and all(a < b for a, b in pairwise(table.starts))
    if not rises or len(table.forms) != len(table.starts):
        raise ValueError("no table of forms")
    if any(form not in possible_forms(kind, start) for start, form in zip(table.starts, table.forms, strict=True)):
        raise ValueError("a form that its kind does not have")
    return kind, table
