"""From the host to the device, without waiting for what the device still has to do."""

from collections.abc import Sequence as Items

import torch
from torch import Tensor


def to_device(
    values: Items[float] | Tensor,  # numbers, or a tensor on the host
    device: torch.device,
    dtype: torch.dtype | None = None,  # None is int64 for integers, and a tensor's own
) -> Tensor:
    """The values on `device`; a GPU copies them from pinned memory when their turn comes, in the order of its work."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype or torch.int64)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
