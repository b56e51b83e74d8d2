"""How often exits were right on a user's own prompts, kept beside the costs of the machine."""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Any

from ..checkpoints import fingerprint, heads_fingerprint, write_atomically
from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_file import kept_path
from .cost_model import Acceptance
from .planner import measured_acceptance
from .replay import acceptance_from_list, acceptance_to_list

FORMAT_VERSION = 1


def acceptance_key(model: EarlyExitModel, temperature: float) -> dict[str, Any]:
    """All that acceptance depends on but the prompts, JSON-ready: base, heads with their weights, and temperature."""
    return {
        "format_version": FORMAT_VERSION,
        "holds": "acceptance",
        "base": fingerprint(model.base),
        "heads": [head.config.to_dict() for head in model.exit_heads],
        "weights": heads_fingerprint(model.heads),
        "temperature": float(temperature),
    }


def prompts_digest(prompts: Items[list[int]], params: SamplingParams) -> str:
    """Tells these prompts and lengths of answers from others."""
    return hashlib.sha256(json.dumps([list(prompts), params.max_new_tokens]).encode()).hexdigest()[:32]


def read_acceptance(
    model: EarlyExitModel,
    temperature: float,
    digest: str | None = None,  # from `prompts_digest`; None takes what was measured last, whatever on
) -> Acceptance | None:
    """What was kept for these heads; None where nothing that can be read was."""
    key = acceptance_key(model, temperature)
    try:
        record = json.loads(kept_path(key).read_text(encoding="utf-8"))
        found = acceptance_from_list(record["courses"], model.exit_layers, model.backbone.num_layers)
        is_ours = record["key"] == key and digest in (None, record["prompts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if is_ours else None


def write_acceptance(model: EarlyExitModel, temperature: float, digest: str, acceptance: Acceptance) -> None:
    """Keep it in the place of what was measured before; where the disk refuses, it will be measured again."""
    key = acceptance_key(model, temperature)
    record: Mapping[str, Any] = {"key": key, "prompts": digest, "courses": acceptance_to_list(acceptance)}
    path = kept_path(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record) + "\n")


def known_acceptance(model: EarlyExitModel, temperature: float = 0.0) -> Acceptance:
    """What `hispec-plan --prompts` measured last at this temperature, else what the adapter tells: greedy, or for any
    other temperature sampled at temperature 1.

    Raises ValueError where there are exits and neither tells how they do.
    """
    found = read_acceptance(model, temperature) if model.heads else None
    if found is not None:
        return found
    depth = model.backbone.num_layers
    return measured_acceptance(model.acceptance, model.exit_layers, depth, greedy=temperature == 0)
