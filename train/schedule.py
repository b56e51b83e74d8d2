"""The learning rate of every step."""

import math


def learning_rate_at(step: int, num_steps: int, peak: float, warmup_steps: int, schedule: str = "cosine") -> float:
    """Linear warmup from 0, at most half of the way, then `schedule`; `step` counts from 0.

    "cosine" and "linear" go down to 0, "constant" stays at the peak.
    """
    warmup_steps = min(warmup_steps, num_steps // 2)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    part = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - part)
    return peak * 0.5 * (1 + math.cos(math.pi * part))
