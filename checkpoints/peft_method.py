"""Exit heads as a method of peft: a thin tuner over the same modules, in the same files as `save_adapter`'s.

The heads hang on the base in one module, `exit_heads`, beside what the base computes: its own forward and `generate`
are untouched. `early_exit_model` hands them to the runtime.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TaskType, register_peft_method
from torch import Tensor, nn

from ..heads import EarlyExitModel, ExitHeadConfig, base_of, head_kinds
from .adapter import (
    FORMAT_VERSION,
    HEADS_PREFIX,
    PEFT_TYPE,
    TENSOR_PREFIX,
    by_head_name,
    check_base,
    check_tensors,
    check_version,
    read_head_config,
)
from .provenance import HEADS_MODULE, adapter_fingerprint

IN_PEFT_MODEL = TENSOR_PREFIX.removesuffix(HEADS_PREFIX)
SHORT_FORMS = ("exit_layers", "head", "draft_vocab_size", "committed_context", "lora_rank")
NO_MERGE = "exit heads are no change of the base's weights and cannot be merged into them; use unload()"


@dataclass
class HiSpecConfig(PeftConfig):
    """Exit heads for `get_peft_model`; raises ValueError for what no head can be.

    Give `exit_layers` and what goes with them, as for `EarlyExitModel.from_base`, or each head in `heads`.
    """

    exit_layers: Sequence[int] | None = None
    """Number of decoder layers before each head, rising; 4 and 8 unless given."""
    head: str | Sequence[str] = "block"
    """The kind of all heads, or of each."""
    draft_vocab_size: int | None = None
    """Number of token ids that the heads score, the lowest ones; None scores all."""
    committed_context: bool = False
    """Whether the base's final state of the newest committed token is a second input."""
    lora_rank: int | None = None
    """Rank of heads of kind `lora`."""
    heads: list[dict[str, Any]] | None = None
    """One `ExitHeadConfig` each, as a mapping: what is written to the file."""
    base_fingerprint: dict[str, Any] | None = None
    """What tells the base that the heads were made with from others; None takes any, and notes it."""
    format_version: int = FORMAT_VERSION
    """Of the files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(PEFT_TYPE)
        self.task_type = self.task_type or TaskType.CAUSAL_LM
        check_version(self.format_version, "the adapter's config")
        if self.heads is None:
            exit_layers = tuple((4, 8) if self.exit_layers is None else self.exit_layers)
            kinds: Any = self.head
            self.heads = [
                ExitHeadConfig(
                    exit_layer=exit_layer,
                    kind=kind,
                    committed_context=self.committed_context,
                    draft_vocab_size=self.draft_vocab_size,
                    lora_rank=self.lora_rank if kind == "lora" else None,
                ).to_dict()
                for exit_layer, kind in zip(exit_layers, head_kinds(kinds, len(exit_layers)), strict=True)
            ]
        elif self.exit_layers is not None:
            raise ValueError("both heads and exit_layers are given; give one of them")
        self.head_configs()

    def head_configs(self) -> list[ExitHeadConfig]:
        """The heads, shallowest first."""
        return [read_head_config(values, "the adapter's config, heads") for values in self.heads or []]

    def to_dict(self) -> dict[str, Any]:
        """What is written to `adapter_config.json`."""
        values = {name: value for name, value in asdict(self).items() if name not in SHORT_FORMS}
        return values | {"format_version": FORMAT_VERSION}


class ExitHeads(nn.Module, BaseTunerLayer):
    """The heads of all adapters on one base."""

    adapter_layer_names = ("hispec_heads",)

    def __init__(self) -> None:
        super().__init__()
        self.hispec_heads = nn.ModuleDict()
        self.merged_adapters: list[str] = []
        # Not as parts of this module: they hold the base, which holds this.
        self.models: dict[str, EarlyExitModel] = {}
        self.not_loaded: dict[str, dict[str, Tensor]] = {}
        """By adapter, the tensors as they were made, of one whose own are in a file."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused."""
        raise ValueError(NO_MERGE)

    def delete_adapter(self, adapter_name: str) -> None:
        """Forget the heads of an adapter."""
        super().delete_adapter(adapter_name)
        self.models.pop(adapter_name, None)
        self.not_loaded.pop(adapter_name, None)


class HiSpecModel(BaseTuner):
    """The tuner: puts heads on a base and takes them off again."""

    prefix = "hispec_"
    tuner_layer_cls = ExitHeads

    def __init__(self, model: Any, peft_config: Any, adapter_name: str, **options: Any) -> None:
        base: Any = base_of(model)
        # Adapters that the base carries already keep their configs: peft would mix them with these.
        carried = base.__dict__.pop("peft_config", None)
        try:
            super().__init__(base, peft_config, adapter_name, **options)
        finally:
            base.__dict__.pop("peft_config", None)
            if carried is not None:
                base.peft_config = carried
        base.peft_config = {**self.peft_config, **(carried or {})}
        self._carried = carried

    def early_exit_model(self, adapter_name: str | None = None) -> EarlyExitModel:
        """The active adapter's heads, or those of another, for an `Engine`."""
        return early_exit_model(self.model, adapter_name)

    def inject_adapter(
        self,
        model: Any,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Hang new heads on `model`; raises ValueError where they were made for another base."""
        config: Any = self.peft_config[adapter_name]
        is_from_file = config.base_fingerprint is not None
        if is_from_file:
            check_base(model, config.base_fingerprint, config.base_model_name_or_path, "the adapter")
        layer = _heads_on(model)
        had_gradients = [] if layer is None else [p for p in layer.parameters() if p.requires_grad]
        heads = EarlyExitModel.from_configs(model, config.head_configs())
        if any(tensor.is_meta for tensor in heads.heads.state_dict().values()):
            raise ValueError("exit heads are made with their tensors; leave out low_cpu_mem_usage")
        if not is_from_file:
            config.base_fingerprint = adapter_fingerprint(model)
        if layer is None:
            layer = ExitHeads()
            setattr(model, HEADS_MODULE, layer)
        layer.models[adapter_name] = heads
        layer.hispec_heads[adapter_name] = heads.heads
        if is_from_file:
            layer.not_loaded[adapter_name] = dict(_tensors(heads))
        self.targeted_module_names = [HEADS_MODULE]
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        for parameter in had_gradients:
            parameter.requires_grad_(True)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Choose the adapter that `early_exit_model` returns."""
        _heads_on(self.model, needed=True).set_adapter(adapter_name, inference_mode=inference_mode)
        self.active_adapter = adapter_name

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Whether the heads of these adapters are trained."""
        _heads_on(self.model, needed=True).set_requires_grad(adapter_names, requires_grad)

    def delete_adapter(self, adapter_name: str) -> None:
        """Take the heads of one adapter off the base."""
        if adapter_name not in self.peft_config:
            raise ValueError(f"there is no adapter {adapter_name!r} to delete")
        del self.peft_config[adapter_name]
        layer = _heads_on(self.model, needed=True)
        layer.delete_adapter(adapter_name)
        self.active_adapter = layer.active_adapters

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Refused."""
        raise ValueError(NO_MERGE)

    def _unload_and_optionally_merge(  # type: ignore[override]  # what peft itself returns, whatever it says
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            raise ValueError(NO_MERGE)
        _take_off(self.model)
        self.model.__dict__.pop("peft_config", None)
        if self._carried is not None:
            self.model.peft_config = self._carried
        return self.model

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        # Not the layers of other adapters, as the base class would.
        _heads_on(self.model, needed=True).enable_adapters(enabled)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Nothing: heads have the base's type, by which they are run."""

    def _create_and_replace(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("no module of the base is replaced")

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor], unwanted_adapter_names: Any
    ) -> dict[str, Tensor]:
        return {name: value for name, value in state_dict.items() if f"{HEADS_PREFIX}{adapter_name}." in name}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # Transformers adds peft's prefix itself where there is no PeftModel.
        start, found, name = key.partition(f"{HEADS_PREFIX}{adapter_name}.")
        return f"{IN_PEFT_MODEL if start else ''}{HEADS_PREFIX}{name}" if found else key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The file's tensors by their names in `model`; peft itself would only warn of a missing one."""
        base = base_of(model)
        layer = _heads_on(base, needed=True)
        try:
            tensors = by_head_name(state_dict, "the adapter's file")
            check_tensors(tensors, layer.models[adapter_name], "the adapter's file")
        except ValueError:
            layer.delete_adapter(adapter_name)
            if not layer.models:
                _take_off(base)
            raise
        layer.not_loaded.pop(adapter_name, None)
        prefix = "base_model.model." if model is not base else ""
        return {f"{prefix}{HEADS_PREFIX}{adapter_name}.{name}": tensor for name, tensor in tensors.items()}


def early_exit_model(model: Any, adapter_name: str | None = None) -> EarlyExitModel:
    """The heads on a PeftModel, or on a model of transformers with `load_adapter`, for an `Engine`.

    `adapter_name` None is the active adapter. The tensors are shared, so what trains them shows in both. Raises
    ValueError where there are no heads, or where tensors of theirs were not in the adapter's file.
    """
    layer = _heads_on(base_of(model), needed=True)
    name = layer.active_adapters[0] if adapter_name is None and layer.active_adapters else adapter_name
    if name not in layer.models:
        raise ValueError(f"there is no adapter {name!r} with exit heads; there are {', '.join(layer.models) or 'none'}")
    heads: EarlyExitModel = layer.models[name]
    as_made = layer.not_loaded.get(name, {})
    for tensor_name, tensor in _tensors(heads).items():
        if tensor is as_made.get(tensor_name):
            raise ValueError(
                f"the tensor {tensor_name!r} of the adapter {name!r} was not loaded; get its file again, or, for new "
                "heads, set base_fingerprint of their config to None"
            )
    layer.not_loaded.pop(name, None)
    heads.bind_heads()
    return heads


def _tensors(model: EarlyExitModel) -> dict[str, Tensor]:
    """The very tensors of the heads; a state dict has others over the same memory."""
    return dict([*model.heads.named_parameters(), *model.heads.named_buffers()])


def _heads_on(base: Any, needed: bool = False) -> Any:  # ExitHeads, or None where there are none yet
    layer = getattr(base, HEADS_MODULE, None)
    if needed and layer is None:
        raise ValueError("this model has no exit heads; load an adapter with heads, or make them by a HiSpecConfig")
    return layer


def _take_off(base: Any) -> None:
    if _heads_on(base) is not None:
        delattr(base, HEADS_MODULE)


def _register() -> None:
    """Make the method known to peft, which has a closed list of those that it brings itself."""
    members: Any = PeftType
    if PEFT_TYPE not in members.__members__:
        member = str.__new__(members, PEFT_TYPE)
        member._name_, member._value_ = PEFT_TYPE, PEFT_TYPE
        members._member_map_[PEFT_TYPE] = members._value2member_map_[PEFT_TYPE] = member
        members._member_names_.append(PEFT_TYPE)
        type.__setattr__(members, PEFT_TYPE, member)
        register_peft_method(name=PEFT_TYPE.lower(), config_cls=HiSpecConfig, model_cls=HiSpecModel, prefix="hispec_")


_register()
