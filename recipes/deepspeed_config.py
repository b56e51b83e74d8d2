"""DeepSpeed's part of a run: how ZeRO partitions, and nothing that the recipe says."""

import json
from pathlib import Path
from typing import Any

SHIPPED = ("zero2", "zero3")

OF_THE_RECIPE = {
    "optimizer": "training.learning_rate and training.weight_decay",
    "scheduler": "training.lr_schedule",
    "gradient_clipping": "training.max_grad_norm",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "torch_autocast": "training.precision",
    "amp": "training.precision",
    "activation_checkpointing": "training.activation_checkpointing",
    "train_batch_size": "training.batch_tokens",
    "train_micro_batch_size_per_gpu": "training.batch_tokens",
    "gradient_accumulation_steps": "training.batch_tokens",
}
"""What a DeepSpeed config may hold elsewhere, and what decides it here."""


def deepspeed_config(name: str) -> dict[str, Any]:
    """The config of `zero2`, `zero3` or a JSON file; ValueError for one that is no ZeRO-2 or ZeRO-3 config of ours."""
    path = Path(__file__).resolve().parent / f"{name}.json" if name in SHIPPED else Path(name).expanduser()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"the DeepSpeed config {name!r} does not exist; give zero2, zero3 or the path of a JSON file"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"the DeepSpeed config {name} cannot be read as JSON ({error}); mend the file") from error
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (2, 3):
        raise ValueError(
            f"the DeepSpeed config {name} has no zero_optimization.stage of 2 or 3; set one, or leave --deepspeed out "
            "for plain data parallelism"
        )
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section):
            raise ValueError(
                f"the DeepSpeed config {name} sets zero_optimization.{section}: the heads are small beside the base, "
                "and their checkpoints need them on the device; remove it"
            )
    for key, knob in OF_THE_RECIPE.items():
        if key in config:
            raise ValueError(f"the DeepSpeed config {name} sets {key}, which {knob} of the recipe decides; remove it")
    return dict(config)
