"""Modules that stand in for a base's plain ones: adapters that peft has put around them, and quantised layers.

They compute something else than their `weight` says, or have none to read: they are called as they are, never taken
apart. D_in input size; D_out output size.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HELD_AS = ("base_layer", "original_module")
"""Names under which peft's modules hold the one that they stand in for."""

NEEDS_ITS_OWN_FORWARD = ("XLORA", "POLY")
"""Methods of peft whose adapters are told by the PeftModel, in every call, what to do."""

IDENTITY_ROWS = 256
"""Rows of the identity that a layer is asked for at once."""


def base_of(model: Any) -> PreTrainedModel:
    """The transformers model in a PeftModel, with its adapters in it; any other model as it is.

    Raises ValueError for adapters that are more than modules of the model.
    """
    configs = getattr(model, "peft_config", None) or {}
    for name, config in configs.items():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        is_more = config.is_prompt_learning or config.is_adaption_prompt or method in NEEDS_ITS_OWN_FORWARD
        if is_more or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"the adapter {name!r} on this base ({method}) does more than replace layers by others, which exit "
                "heads cannot follow; use the base without it, or one of its kind that can be merged"
            )
    return base_of(model.get_base_model()) if hasattr(model, "get_base_model") else model


def is_plain_linear(module: Any) -> bool:
    """Whether `module` is `hidden @ weight.T + bias` over ordinary tensors, and nothing is hooked to it."""
    return type(module) is nn.Linear and _is_plain(module)


def is_plain_embedding(module: Any) -> bool:
    """Whether `module` gives rows of an ordinary tensor as they are, and nothing is hooked to it."""
    return type(module) is nn.Embedding and module.max_norm is None and _is_plain(module)


def _is_plain(module: Any) -> bool:
    # Some libraries quantise by another class of tensor in an ordinary layer.
    is_ordinary = type(module.weight) is nn.Parameter and module.weight.is_floating_point()
    return is_ordinary and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_stand_in(module: nn.Module) -> bool:
    """Whether `module` stands in for a plain one."""
    if held_module(module) is not None:
        return True
    return _is_linear(module) and not is_plain_linear(module)


def is_quantized(module: Any) -> bool:
    """Whether `module` is a linear layer of another class, or with another kind of numbers, than an ordinary one."""
    if held_module(module) is not None or not _is_linear(module):
        return False
    return not (type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.is_floating_point())


def held_module(module: nn.Module) -> nn.Module | None:
    """What an adapter's module stands in for; None for any other module."""
    return next((module._modules[name] for name in HELD_AS if name in module._modules), None)


def stand_ins(module: nn.Module) -> Iterator[nn.Module]:
    """All of them in `module`, and none of their own parts."""
    if is_stand_in(module):
        yield module
        return
    for child in module.children():
        yield from stand_ins(child)


def plain_copy(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A deep copy in which ordinary linear layers, of about the same weights, take the place of stand-ins.

    Raises ValueError for one that is no linear layer.
    """
    in_their_place = {id(found): _plain_linear(found, dtype, device) for found in stand_ins(module)}
    return copy.deepcopy(module, in_their_place)


def read_weight(
    linear: Any,
    dtype: torch.dtype,
    device: torch.device,
    rows: Tensor | None = None,  # [R] int64, which outputs; None is all
) -> tuple[Tensor, Tensor]:  # [D_out or R, D_in], [D_out or R]
    """The weight and the bias by which a linear stand-in computes, found by asking it for the identity."""
    chosen = slice(None) if rows is None else rows
    with torch.no_grad():
        bias = linear(torch.zeros(1, linear.in_features, dtype=dtype, device=device))[0, chosen]
        columns = []
        for start in range(0, linear.in_features, IDENTITY_ROWS):
            size = min(IDENTITY_ROWS, linear.in_features - start)
            part = torch.zeros(size, linear.in_features, dtype=dtype, device=device)
            part[torch.arange(size), start + torch.arange(size)] = 1
            columns.append((linear(part)[:, chosen] - bias).t())
    return torch.cat(columns, 1).contiguous(), bias.clone()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _plain_linear(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    if not _is_linear(module):
        raise ValueError(
            f"a head that starts as a copy of the base cannot copy its {type(module).__name__}, which an adapter has "
            "put there; choose another kind of head, or merge the adapter into the base first"
        )
    weight, bias = read_weight(module, dtype, device)
    has_bias = bool((bias != 0).any())
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, dtype=dtype, device=device)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if has_bias:
            linear.bias.copy_(bias)
    return linear
