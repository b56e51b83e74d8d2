"""A mode in which nothing may ask the device for a number, nor send it one."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"),
    *("unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "bincount"),
}
"""Operations whose result, or its shape, the host reads."""
SENDING = {"lift", "lift_fresh", "pin_memory", "_pin_memory"}
METHODS = {"tolist", "item", "cpu", "cuda", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "to"}
FUNCTIONS = {"tensor", "as_tensor", "asarray", "from_numpy", "where", "nonzero"}


class HostIsTouchedError(AssertionError):
    """Something was read from the device or sent to it."""


class _ByFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "to":
            # What converts is no transfer, and a layer may well name the device that the tensor is on.
            named = [*args[1:], *kwargs.values()]
            if any(torch.device(each) != args[0].device for each in named if isinstance(each, (str, torch.device))):
                raise HostIsTouchedError("to another device")
        elif name in METHODS or (name in FUNCTIONS and (name != "where" or len(args) == 1)):
            raise HostIsTouchedError(name)
        if name in ("__getitem__", "__setitem__"):
            for place in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(place, (list, np.ndarray)) or getattr(place, "dtype", None) in (torch.bool, torch.uint8):
                    raise HostIsTouchedError(f"{name} with {type(place).__name__}")
        return func(*args, **kwargs)


class _ByOperation(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ASKING | SENDING:
            raise HostIsTouchedError(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_is_untouched() -> Iterator[None]:
    """Inside, HostIsTouchedError where a GPU would have to be waited for, or be sent something."""
    with _ByOperation(), _ByFunction():
        yield
