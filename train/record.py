"""The record of a training run: what `run.json` beside an adapter holds, and the report is written from."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ..checkpoints import base_source, run_record
from ..heads import EarlyExitModel
from ..infer import EngineConfig
from ..infer.acceptance_length import hispec_length, single_layer_length
from .evaluate import TARGET

MAX_DRAFT_TOKENS = 8


def training_record(
    model: EarlyExitModel,
    *,
    command: Sequence[str],
    recipe: Mapping[str, Any],  # resolved
    acceptance: Mapping[str, Any],  # from `evaluate`
    curve: Sequence[Mapping[str, Any]],  # from `read_curve`; empty where nothing was trained
    data: Mapping[str, int],  # what was trained and measured on, see below
) -> dict[str, Any]:
    """How an adapter was made and how good it is, JSON-ready and without local paths.

    - `command`, `versions`, `recipe`: see `run_record`.
    - `acceptance`: agreement and expected acceptance of every pair of levels, by kind, distance and place, and what
      rounds of every length do, see `evaluate`.
    - `base`: `source` (a hub id or package, null for a folder), `num_layers`, `hidden_size`, `vocab_size`,
      `num_parameters`.
    - `heads`: for each exit its config, and `num_parameters` and `num_bytes` of what is trained and saved.
    - `curve`: a record for each evaluation during training: `step`, `num_tokens` seen, `loss` by exit since the last
      one, and agreement and acceptance by hop.
    - `predicted_length`: see `predicted_lengths`.
    - `num_training_responses`, `num_training_tokens`, `num_held_out_responses`: the values of `data`.
    """
    backbone = model.backbone
    return {
        **run_record(command=command, recipe=recipe, acceptance=acceptance),
        "base": {
            "source": base_source(model.base),
            "num_layers": backbone.num_layers,
            "hidden_size": backbone.hidden_size,
            "vocab_size": backbone.vocab_size,
            "num_parameters": sum(parameter.numel() for parameter in model.base.parameters()),
        },
        "heads": [
            {
                **head.config.to_dict(),
                "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
                "num_bytes": sum(tensor.nbytes for tensor in head.state_dict().values()),
            }
            for head in model.exit_heads
        ],
        "curve": list(curve),
        "predicted_length": predicted_lengths(acceptance, model.exit_layers),
        **data,
    }


def predicted_lengths(
    acceptance: Mapping[str, Any],  # from `evaluate`, with its distances
    exit_layers: Sequence[int],
) -> dict[str, Any]:
    """Tokens committed per verification by the target, by `num_draft_tokens` from 1 on, as the measurement predicts.

    `single-layer` has an entry for each exit as the draft, `hispec` one for each pair of exits ("2->8": draft,
    intermediate) at `num_provisional_tokens`. Each has two lists: `greedy` and `sampled`, at temperature 1 with the
    rejection rule. Both are counted along the responses (`courses`); where there are too few, `greedy` is from
    `by_place`, and `sampled` from the expected acceptance in `by_distance` as if the places of a draft were
    independent.
    """
    if "courses" in acceptance:
        return _counted_lengths(acceptance["courses"], exit_layers)
    levels = list(map(str, exit_layers))
    lengths = range(1, MAX_DRAFT_TOKENS + 1)
    num_provisional = EngineConfig.num_provisional_tokens
    kept: dict[str, dict[str, list[float]]] = {
        "greedy": {hop: values["agreement"] for hop, values in acceptance["by_place"].items()},
        "sampled": {
            hop: [hops[hop]["acceptance"] for hops in acceptance["by_distance"].values()] for hop in acceptance["hops"]
        },
    }
    single_layer = {
        draft: {
            name: [round(single_layer_length(by_hop[f"{draft}->{TARGET}"], number), 4) for number in lengths]
            for name, by_hop in kept.items()
        }
        for draft in levels
    }
    hispec = {
        f"{draft}->{middle}": {
            name: [
                round(
                    hispec_length(by_hop[f"{draft}->{middle}"], by_hop[f"{middle}->{TARGET}"], number, num_provisional),
                    4,
                )
                for number in lengths
            ]
            for name, by_hop in kept.items()
        }
        for index, draft in enumerate(levels)
        for middle in levels[index + 1 :]
    }
    return {"num_provisional_tokens": num_provisional, "single-layer": single_layer, "hispec": hispec}


def _counted_lengths(courses: Mapping[str, Any], exit_layers: Sequence[int]) -> dict[str, Any]:
    num_provisional = EngineConfig.num_provisional_tokens
    found: dict[str, Any] = {"num_provisional_tokens": num_provisional, "single-layer": {}, "hispec": {}}
    exits = [(layer,) for layer in exit_layers] + list(combinations(exit_layers, 2))
    for chosen in exits:
        method, provisional = ("single-layer", 1) if len(chosen) == 1 else ("hispec", num_provisional)
        found[method]["->".join(map(str, chosen))] = {
            rule: [
                round(each["tokens_per_round"], 4)
                for each in courses[rule]
                if tuple(each["exit_layers"]) == chosen and each["num_provisional_tokens"] == provisional
            ]
            for rule in ("greedy", "sampled")
        }
    return found
