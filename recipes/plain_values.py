"""Plain values, as YAML and JSON give them, into the frozen dataclasses of a recipe."""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

Config = TypeVar("Config")

EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML whose numbers are those of YAML 1.2: 5e-4 is one, as everybody who writes it means."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """The plain values of a YAML text; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def known_keys(kind: type[Any], prefix: str = "") -> list[str]:
    """The dotted names of all values below a dataclass, in order."""
    hints = get_type_hints(kind)
    return [
        name
        for field in fields(kind)
        for name in (
            known_keys(hints[field.name], f"{prefix}{field.name}.")
            if is_dataclass(hints[field.name])
            else [f"{prefix}{field.name}"]
        )
    ]


def parse(
    kind: type[Config],  # a dataclass
    values: object,
    where: str = "",  # dotted place in the recipe
) -> Config:
    """An instance of `kind`; an unknown or missing key or a wrong type is a ValueError that names the key."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the recipe'} is {values!r}; it must be a mapping")
    prefix = f"{where}." if where else ""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(f"the key {prefix}{key} is unknown; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"the key {prefix}{name} is missing; add it")
    hints = get_type_hints(kind)
    return kind(**{key: _read(known[key], hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def _read(field: Field[Any], hint: Any, value: object, where: str) -> object:
    """A value by the field's own `parse`, where it has one in its metadata, else by its type."""
    own = field.metadata.get("parse")
    if own is None or value is None:
        return _convert(hint, value, where)
    try:
        return own(value)
    except ValueError as error:
        raise ValueError(f"{where} is {value!r}: {error}") from None


def _convert(hint: Any, value: object, where: str) -> object:
    """`value` as the type `hint`; a whole number passes for a float, nothing else is bent."""
    if isinstance(hint, type) and is_dataclass(hint):
        return parse(hint, value, where)
    if get_origin(hint) in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(option for option in get_args(hint) if option is not types.NoneType), value, where)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} is {value!r}; choose one of {', '.join(get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        item_hint = get_args(hint)[0]
        if not isinstance(value, list | tuple):
            example = ", ".join(get_args(item_hint)[-2:]) or "4, 8"
            raise ValueError(f"{where} is {value!r}; it must be a list, for example [{example}]")
        return tuple(_convert(item_hint, item, f"{where}[{place}]") for place, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {value!r}; it must be {EXPECTED[hint]}")
    return value
