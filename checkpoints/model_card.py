"""The model card: what an adapter's repository says about it, made from the adapter's own files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .hub import HUB_ID

PAPER = "https://arxiv.org/abs/2510.01336"
TAGS = ["hispec", "speculative-decoding", "self-speculative-decoding", "early-exit"]
EVIDENCE = "held-out responses of the base"
"""What acceptance is measured on, in the metadata."""
HOME = r"/(?:home|Users)/\w|/root/\w|[A-Za-z]:\\Users\\"
"""Where people keep what is theirs, on any machine."""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence as a card's metadata names it."""

    id: str
    """Such as `apache-2.0`; `other` where `name` says more."""
    name: str | None = None
    """Of a licence that has no id."""
    link: str | None = None
    """Its text."""


def make_card(
    config: Mapping[str, Any],  # adapter_config.json
    run: Mapping[str, Any] | None,  # run.json, where there is one
    repo: str,
    licence: Licence | None,  # the base's; None where it could not be found out
    files: Sequence[str] = (),  # names of what goes up beside the card
) -> str:
    """The card as Markdown with its metadata; names no path of the machine that made the adapter."""
    base = config["base_model_name_or_path"]
    assert base is None or is_public_base(base)
    run = run or {}
    acceptance = _mapping(run.get("acceptance"))
    data = ModelCardData(
        base_model=base if base is not None and HUB_ID.fullmatch(base) else None,
        library_name="hispec",
        license=licence.id if licence else None,
        license_name=licence.name if licence else None,
        license_link=licence.link if licence else None,
        model_name=repo.split("/")[-1],
        eval_results=_eval_results(acceptance),
        pipeline_tag="text-generation",
        tags=TAGS,
    )
    if data.base_model:
        data["base_model_relation"] = "adapter"
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {repo.split('/')[-1]}",
        _introduction(config),
        _how_to_load(config, repo),
        _heads(config),
        _data(run),
        _acceptance(acceptance, files),
        _licence(licence),
    ]
    return "\n\n".join(sections) + "\n"


def check_card(text: str, private_paths: Sequence[Path]) -> None:
    """Raise ValueError for a card that the hub would refuse, or that names a path of this machine."""
    try:
        bases = ModelCard(text, ignore_metadata_errors=True).data.get("base_model") or []
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(
            f"README.md has metadata that cannot be read ({' '.join(str(error).split())[:200]})"
        ) from error
    for base in [bases] if isinstance(bases, str) else list(bases):
        if not isinstance(base, str) or not HUB_ID.fullmatch(base):
            raise ValueError(f"README.md names the base model {base!r}, which is no hub id; write user/name")
    # The root of all paths is nobody's.
    paths = [re.escape(str(path)) + r"(?![\w-])" for path in private_paths if len(path.parts) > 1]
    if found := re.search(rf"(?<![\w/.:-])(?:{'|'.join([*paths, HOME])})[^\s`)\"']*", text):
        raise ValueError(f"README.md names {found.group()}, a path of one machine; take it out")


def is_public_base(name: str) -> bool:
    """Whether others can find a base by this name: a hub id, or the `package:` source of an installed package."""
    return re.fullmatch(r"package:[\w.-]+", name) is not None or HUB_ID.fullmatch(name) is not None


def _introduction(config: Mapping[str, Any]) -> str:
    return (
        f"Early-exit heads for {_base_link(config)}, made with hispec. With them the model drafts its own next tokens "
        "behind a few of its layers, and its full depth verifies them (hierarchical speculative decoding, "
        f"[arXiv 2510.01336]({PAPER})): faster generation of exactly its own output. The weights of the base are "
        "neither changed nor part of this repository."
    )


def _base_link(config: Mapping[str, Any]) -> str:
    base, revision = config["base_model_name_or_path"], config["revision"]
    if base is None:
        return f"a {config['base_fingerprint']['architecture'].get('model_type')} model that has no name on the hub"
    if not HUB_ID.fullmatch(base):
        return f"the model inside the Python package `{base.removeprefix('package:')}`"
    at = f" at revision `{revision}`" if revision else ""
    return f"[{base}](https://huggingface.co/{base}){at}"


def _how_to_load(config: Mapping[str, Any], repo: str) -> str:
    base, revision = config["base_model_name_or_path"], config["revision"]
    name = (base or "FOLDER_OF_THE_BASE") + (f"@{revision}" if base and revision else "")
    return f"""## How to load

```python
from hispec import Engine, SamplingParams

engine = Engine.from_pretrained("{name}", adapter="{repo}")
for completion in engine.generate(["Why is the sky blue?"], SamplingParams(max_new_tokens=64)):
    print(completion.text)
```

    hispec-infer --model {name} --adapter {repo} --prompt "Why is the sky blue?"

`load_adapter("{repo}", {"" if base else "base=base, "}revision=...)` gives the heads of one branch, tag or commit. \
Loading is strict: with another base, or other weights of the same architecture, it ends with an error."""


def _heads(config: Mapping[str, Any]) -> str:
    architecture = config["base_fingerprint"]["architecture"]
    num_layers, vocab_size = architecture.get("num_hidden_layers"), architecture.get("vocab_size")
    rows = [["exit layer", "kind", "committed context", "draft vocabulary"]]
    for head in config["heads"]:
        rows.append(
            [
                f"{head['exit_layer']} of {num_layers}",
                f"`{head['kind']}`",
                "yes" if head["committed_context"] else "no",
                f"{head['draft_vocab_size'] or vocab_size} of {vocab_size} tokens",
            ]
        )
    return "## Heads\n\n" + _table(rows)


def _data(run: Mapping[str, Any]) -> str:
    data = _mapping(_mapping(run.get("recipe")).get("data"))
    if not data:
        return "## Training data\n\nHow these heads were made was not recorded."
    parts = []
    if data.get("greedy"):
        parts.append("greedy")
    if data.get("num_sampled"):
        parts.append(f"sampled at temperature {data.get('temperature')}")
    how = f" ({' and '.join(parts)})" if parts else ""
    sizes = [f"{run[key]} {words}" for key, words in _SIZES.items() if isinstance(run.get(key), int)]
    size = f", {' in '.join(sizes)}" if sizes else ""
    prompts = data.get("prompts")
    source = f"the prompts of `{_text(PurePath(prompts).name)}`" if isinstance(prompts, str) else "prompts"
    return (
        f"## Training data\n\nResponses that the base itself gave{how} to {source}{size}. The heads learned the base's "
        "own distribution on them. `run.json` holds the whole recipe, the versions of the packages and the command."
    )


_SIZES = {"num_training_tokens": "tokens", "num_training_responses": "responses"}


def _acceptance(acceptance: Mapping[str, Any], files: Sequence[str]) -> str:
    hops = list(_mapping(acceptance.get("hops")))
    if not hops:
        return "## Measured acceptance\n\nNot recorded."
    groups = {"all": acceptance["hops"], **_mapping(acceptance.get("by_kind"))}
    groups |= {
        f"distance {distance} to the last committed token": values
        for distance, values in _mapping(acceptance.get("by_distance")).items()
    }
    rows = [["", *(_hop(hop) for hop in hops)]]
    rows += [[_text(name), *(_cell(_mapping(values).get(hop)) for hop in hops)] for name, values in groups.items()]
    report = next((name for name in ("report.md", "report.html") if name in files), None)
    more = f" More in [{report}]({report})." if report else ""
    return (
        f"## Measured acceptance\n\nOn {acceptance.get('num_tokens')} tokens of held-out responses: how often "
        "the first choices agree / expected acceptance, the probability that a token drawn at the left level is kept "
        f"by the right one.{more}\n\n"
    ) + _table(rows)


def _licence(licence: Licence | None) -> str:
    if licence is None:
        return (
            "## Licence\n\nThe licence of the base could not be looked up when this card was made; "
            "see the base's own page. These heads are of use only with it."
        )
    name = licence.name or licence.id
    link = f"[{_text(name)}]({licence.link})" if licence.link else f"`{_text(name)}`"
    return f"## Licence\n\nThat of the base, {link}: these heads were made from its weights and its own texts."


def _eval_results(acceptance: Mapping[str, Any]) -> list[EvalResult] | None:
    results = []
    for hop, values in _mapping(acceptance.get("hops")).items():
        for metric, name in (("agreement", "top-1 agreement"), ("acceptance", "expected acceptance")):
            value = _mapping(values).get(metric)
            if isinstance(value, int | float):
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type="held-out",
                        dataset_name=EVIDENCE,
                        metric_type=metric,
                        metric_name=f"{_hop(hop)}, {name}",
                        metric_value=value,
                    )
                )
    return results or None


def _hop(hop: str) -> str:
    """`2->target` as `exit 2 to target`."""
    return " to ".join(f"exit {level}" if level.isdigit() else _text(level) for level in hop.split("->"))


def _cell(values: Any) -> str:
    values = _mapping(values)
    numbers = (values.get("agreement"), values.get("acceptance"))
    return " / ".join(f"{number:.3f}" if isinstance(number, int | float) else "?" for number in numbers)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "--|" * len(rows[0]), *lines[1:]])


def _text(value: object) -> str:
    """One line that Markdown takes as text, in a table too."""
    return re.sub(r"([|`<>\[\]*])", r"\\\1", " ".join(str(value).split()))[:100]


def _mapping(value: Any) -> Mapping[str, Any]:
    """What may have been written by another hispec or by hand: a mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}
