"""The adapter: exit heads on disk and on the hub."""

import json
import warnings
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..heads import EarlyExitModel, ExitHead, ExitHeadConfig, base_of
from .atomic import atomic_folder
from .base_model import load_base
from .hub import download, is_hub_id
from .provenance import adapter_fingerprint, base_source, explain_mismatch, is_requantized

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""In version 1 the tensors had the heads' own names, and peft could not read the config."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RUN_FILE = "run.json"
CARD_FILE = "README.md"
REPORT_FILE, FIGURES_FOLDER = "report.md", "figures"
ADAPTER_FILES = [CONFIG_FILE, WEIGHTS_FILE, RUN_FILE]
VERIFIER_CONFIG_FILE, VERIFIER_WEIGHTS_FILE = "draft_verifier.json", "draft_verifier.safetensors"
VERIFIER_FILES = [VERIFIER_CONFIG_FILE, VERIFIER_WEIGHTS_FILE]
"""Optional: see `verifier_file`."""
CONFIG_KEYS = {"format_version", "base_model_name_or_path", "revision", "base_fingerprint", "heads"}
PEFT_KEYS = {"peft_type", "task_type", "peft_version", "auto_mapping", "inference_mode"}
"""What peft writes for itself, or reads: see `peft_method`."""
HEAD_KEYS = {"exit_layer", "kind", "committed_context", "draft_vocab_size"}
OPTIONAL_HEAD_KEYS = {"lora_rank"}
PEFT_TYPE = "HISPEC"
HEADS_PREFIX = "exit_heads.hispec_heads."
TENSOR_PREFIX = f"base_model.model.{HEADS_PREFIX}"
"""Before the heads' own names of tensors: where peft and transformers look for them."""


def save_adapter(
    model: EarlyExitModel,
    folder: str | Path,
    run: Mapping[str, Any] | None = None,  # JSON-ready, how the heads were made: `run_record`
    *,
    dtype: torch.dtype | None = None,  # of the saved weights; None keeps theirs
    report: Mapping[str, str] | None = None,  # by name, `report.md` and `figures/*.svg`: their text
) -> None:
    """Write the heads of `model`, without any weight of the base, wholly or not at all.

    An adapter that is in `folder` already is replaced, its report too, its README.md kept; a verifier of the old heads
    goes. Raises ValueError where the folder holds other files, or cannot be written.
    """
    folder = Path(folder).expanduser()
    if not model.exit_layers:
        raise ValueError("the model has no exit heads to save; make them with EarlyExitModel.from_base")
    check_replaceable(folder)
    source = base_source(model.base)
    config = {
        "format_version": FORMAT_VERSION,
        "base_model_name_or_path": source,
        "revision": getattr(model.base.config, "_commit_hash", None) if source else None,
        "base_fingerprint": adapter_fingerprint(model.base),
        "heads": [head.config.to_dict() for head in model.heads if isinstance(head, ExitHead)],
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
    }
    tensors = {TENSOR_PREFIX + name: _to_disk(tensor, dtype) for name, tensor in model.heads.state_dict().items()}
    with atomic_folder(folder) as partial:
        _write_json(partial / CONFIG_FILE, config)
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        if run is not None:
            _write_json(partial / RUN_FILE, run)
        for name, text in (report or {}).items():
            assert name == REPORT_FILE or PurePath(name).parent == PurePath(FIGURES_FOLDER)
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(text, encoding="utf-8")
        if (folder / CARD_FILE).is_file():
            (partial / CARD_FILE).write_bytes((folder / CARD_FILE).read_bytes())


def load_adapter(
    source: str | Path,
    base: PreTrainedModel | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> EarlyExitModel:
    """The base with the exit heads of an adapter, in the base's dtype and on its device.

    `source` is a folder or a hub id, `revision` the adapter's on the hub; `user/name@revision` says both. Without
    `base` the one that the adapter names is loaded in `dtype` on `device`. Raises ValueError, naming what is wrong,
    unless it is the base that the heads were saved with and every tensor fits. What run.json tells of measured
    acceptance is the model's `acceptance`.
    """
    folder = _find(str(source), revision)
    config = _read_config(folder)
    where = f"{folder / CONFIG_FILE}, heads"
    head_configs = [read_head_config(values, where) for values in config["heads"]]
    tensors = _read_tensors(folder)
    if base is None:
        base = _load_recorded_base(config, folder, dtype, device)
    base = base_of(base)
    check_base(base, config["base_fingerprint"], config["base_model_name_or_path"], f"the adapter {folder}")
    model = EarlyExitModel.from_configs(base, head_configs)
    check_tensors(tensors, model, folder / WEIGHTS_FILE)
    model.heads.load_state_dict(tensors)
    model.refresh_draft_vocab()
    model.acceptance = _read_acceptance(folder)
    model.adapter_folder = folder
    return model


def check_adapter(folder: Path) -> dict[str, Any]:
    """The config of an adapter in a folder, strictly read, its weights file too as far as it goes without the base.

    Raises ValueError for what `load_adapter` would refuse.
    """
    config = _read_config(folder)
    for values in config["heads"]:
        read_head_config(values, f"{folder / CONFIG_FILE}, heads")
    _read_tensors(folder)
    return config


def check_base(base: PreTrainedModel, recorded: Mapping[str, Any], name: str | None, adapter: str) -> None:
    """Raise ValueError unless `base` is the one of the `recorded` fingerprint."""
    found = adapter_fingerprint(base)
    if mismatch := explain_mismatch(recorded, found):
        named = name or "another base"
        raise ValueError(f"{adapter} was made for {named}, not for this base: {mismatch}; load that one")
    if is_requantized(recorded, found):
        warnings.warn(
            f"{adapter} was made on the base in another quantisation ({recorded.get('quantization', 'none')}): "
            "texts are this base's own all the same, but fewer drafted tokens may be accepted",
            stacklevel=3,
        )


def shipped_adapter(name: str) -> Path | None:
    """The folder of the adapter that comes with hispec for a model alias; None where there is none."""
    folder = Path(str(files(__package__))) / name
    return folder if name.isidentifier() and (folder / CONFIG_FILE).is_file() else None


def check_replaceable(folder: Path) -> None:
    """Raise ValueError where `save_adapter` would not write: a file, or a folder with other things in it."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; choose a folder for the adapter")
    if not folder.is_dir():
        return
    known = {*ADAPTER_FILES, *VERIFIER_FILES, CARD_FILE, REPORT_FILE, FIGURES_FOLDER}
    others = {path.name for path in folder.iterdir()} - known
    others |= {path.name for path in (folder / FIGURES_FOLDER).glob("*") if path.suffix != ".svg"}
    if others:
        raise ValueError(f"{folder} holds other files ({', '.join(sorted(others)[:3])}); choose a new folder")


def _to_disk(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _find(source: str, revision: str | None) -> Path:
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return folder
    repo, _, pinned = source.partition("@")
    if pinned and revision not in (None, pinned):
        raise ValueError(f"the adapter {source!r} is also said to be of revision {revision!r}; say one of them")
    if is_hub_id(repo) and not folder.exists():
        folder = download(repo, pinned or revision, [*ADAPTER_FILES, *VERIFIER_FILES])
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ValueError(f"{source!r} holds no {name}, so it is no adapter of hispec; check the name")
        return folder
    raise ValueError(f"the adapter {source!r} is no folder here and no hub id (user/name[@revision]); check the path")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {CONFIG_FILE}; give a folder that save_adapter wrote") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); get the adapter again") from error
    if not isinstance(config, dict) or "format_version" not in config:
        raise ValueError(f"{path} has no format_version; give an adapter that save_adapter wrote")
    check_version(config["format_version"], str(path))
    if config.get("peft_type", PEFT_TYPE) != PEFT_TYPE:
        raise ValueError(f"{path} is an adapter of another kind ({config['peft_type']!r}); load it with peft")
    _check_keys(config, CONFIG_KEYS, str(path), PEFT_KEYS)
    for key in ("base_model_name_or_path", "revision"):
        if config[key] is not None and not isinstance(config[key], str):
            raise ValueError(f"{path}: {key} is {config[key]!r}, neither text nor null; get the adapter again")
    recorded = config["base_fingerprint"]
    if (
        not isinstance(recorded, dict)
        or not isinstance(recorded.get("architecture"), dict)
        or "weights" not in recorded
    ):
        raise ValueError(f"{path}: base_fingerprint is {recorded!r}, no fingerprint; get the adapter again")
    if not isinstance(config["heads"], list) or not config["heads"]:
        raise ValueError(f"{path}: heads is {config['heads']!r}; it must list at least one head; get the adapter again")
    return config


def check_version(version: object, where: str) -> None:
    """Raise ValueError for a format that is not known here."""
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise ValueError(f"{where} has format version {version!r}, this hispec reads {known}; update hispec")


def _read_acceptance(folder: Path) -> dict[str, Any] | None:
    """What run.json tells of it; nothing that loading needs, so a broken file is as good as none."""
    try:
        acceptance = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["acceptance"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return acceptance if isinstance(acceptance, dict) else None


def read_head_config(values: object, where: str) -> ExitHeadConfig:
    """One head as it is in an adapter's config; raises ValueError, which begins with `where`."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values!r} is no mapping; get the adapter again")
    _check_keys(values, HEAD_KEYS, where, OPTIONAL_HEAD_KEYS)
    for key, allowed in (
        ("exit_layer", {int}),
        ("kind", {str}),
        ("committed_context", {bool}),
        ("draft_vocab_size", {int, type(None)}),
        ("lora_rank", {int, type(None)}),
    ):
        if type(values.get(key)) not in allowed:
            raise ValueError(f"{where}: {key} is {values[key]!r}, of the wrong type; get the adapter again")
    try:
        return ExitHeadConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_keys(values: dict[str, Any], known: set[str], where: str, optional: set[str] | None = None) -> None:
    for key in sorted(values.keys() - known - (optional or set())):
        raise ValueError(f"{where}: the key {key!r} is unknown (known: {', '.join(sorted(known))}); update hispec")
    for key in sorted(known - values.keys()):
        raise ValueError(f"{where}: the key {key!r} is missing; get the adapter again")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS_FILE}; give a folder that save_adapter wrote")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is broken or cut short ({error}); get the adapter again") from error
    return by_head_name(tensors, path)


def by_head_name(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """The tensors of a file of any version, or of peft, by their names within the heads."""
    named: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.partition(HEADS_PREFIX)[2] or full_name
        if name in named:
            raise ValueError(f"{where} has the tensor {name!r} twice; get the adapter again")
        named[name] = tensor
    return named


def _load_recorded_base(
    config: Mapping[str, Any], folder: Path, dtype: str | torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    name = config["base_model_name_or_path"]
    if not name:
        raise ValueError(
            f"the adapter {folder} was made on a local base and names none; give it: load_adapter(..., base)"
        )
    return load_base(name, dtype=dtype, device=device, revision=config["revision"])[0]


def check_tensors(tensors: Mapping[str, Tensor], model: EarlyExitModel, where: str | Path) -> None:
    """Raise ValueError, which names the tensor, unless `tensors` are all those of the heads of `model` and no other."""
    expected = model.heads.state_dict()
    for name in sorted(expected.keys() - tensors.keys()):
        raise ValueError(f"{where} lacks the tensor {name!r}; get the adapter again")
    for name in sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"{where} has a tensor {name!r} that no head takes; get the adapter again or update hispec")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{where}: the tensor {name!r} has shape {list(tensor.shape)}, its head takes "
                f"{list(expected[name].shape)}; get the adapter again"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(
                f"{where}: the tensor {name!r} is {tensor.dtype}, of the wrong kind; get the adapter again"
            )
        if not tensor.is_floating_point():
            _check_draft_vocab(tensor, name, model.backbone.vocab_size, where)


def _check_draft_vocab(token_ids: Tensor, name: str, vocab_size: int, where: str | Path) -> None:
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or (token_ids.diff() <= 0).any():
        raise ValueError(f"{where}: {name!r} must rise within 0 to {vocab_size - 1}; get the adapter again")
