"""Overrides: single values put over a recipe, as `training.learning_rate=3e-4` on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import yaml

from .plain_values import known_keys, read_yaml
from .schema import Recipe, recipe_from_dict, run_name


def override(
    recipe: Recipe,
    assignments: Sequence[str],  # each `section.key=value`, the value in YAML; of one key the last wins
    flags: Mapping[str, Any] | None = None,  # by dotted key: plain values that win over all of them
) -> Recipe:
    """The recipe with these values in place of its own; a run on another model is named after that model.

    What goes together is checked when all stand. Raises ValueError for a key that does not exist, naming the nearest,
    and for a value of the wrong type.
    """
    values = recipe.to_dict()
    given = set()
    for key, value in [*map(_read, assignments), *(flags or {}).items()]:
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
        given.add(key)
    changed = recipe_from_dict(values, name=recipe.name)
    if "model.source" in given and "name" not in given:
        changed = replace(changed, name=run_name(changed.model.source))
    return changed


def _read(assignment: str) -> tuple[str, object]:
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"{assignment!r} is no override; write key=value, for example training.learning_rate=3e-4")
    known = known_keys(Recipe)
    if key not in known:
        raise ValueError(f"the key {key} is unknown; {_suggest(key, known)}")
    if not text.strip():
        raise ValueError(f"the override {assignment!r} has no value; write {key}=null for none")
    try:
        return key, read_yaml(text)
    except yaml.YAMLError:
        raise ValueError(f"the value of {assignment!r} cannot be read as YAML; put it in quotes") from None


def _suggest(key: str, known: Sequence[str]) -> str:
    within = [name for name in known if name.startswith(f"{key}.")]
    near = get_close_matches(key, known, n=2, cutoff=0.6)
    # Written without its section.
    near = [name for name in known if name.rpartition(".")[2] == key] or near
    if within:
        return f"it is a section; name a key in it: {', '.join(within)}"
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known are {', '.join(known)}"
