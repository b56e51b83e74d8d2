"""What an engine may take of the machine's memory."""

import psutil
import torch

from ..heads import EarlyExitModel
from .config import EngineConfig

MEMORY_SHARE = 0.25
"""Of the machine's memory, what the KV cache takes at most when `num_blocks` is not given."""


def should_pack(config: EngineConfig, model: EarlyExitModel) -> bool:
    """Whether to keep packed copies of the weights: as configured, or where there is room for them."""
    if config.pack_weights is not None or model.is_packed:
        return config.pack_weights is not False
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return num_bytes <= psutil.virtual_memory().available / 2


def default_num_blocks(config: EngineConfig, max_context: int, num_bytes_per_token: int, device: torch.device) -> int:
    """Blocks for as many full contexts as may run at once, within `MEMORY_SHARE`."""
    full = config.max_num_seqs * -(-max_context // config.block_size)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    return max(1, min(full, int(memory * MEMORY_SHARE // (num_bytes_per_token * config.block_size))))
