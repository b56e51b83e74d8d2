"""What a job takes on a machine that also does other things. Numbers in, numbers out."""

import statistics
from collections.abc import Sequence as Items

DISTURBED = 1.6
"""A run that takes so many times the median was disturbed: runs differ by less of themselves."""


def undisturbed_mean(values: Items[float]) -> float:
    """The mean without the runs that something else on the machine disturbed.

    Costs and the rates that they predict are both taken so: a stricter choice on one side alone would make every
    prediction too fast or too slow.
    """
    limit = DISTURBED * statistics.median(values)
    return statistics.mean(value for value in values if value <= limit)


def disturbed_share(values: Items[float]) -> float:
    """The share of runs that are left out of it."""
    limit = DISTURBED * statistics.median(values)
    return statistics.mean(float(value > limit) for value in values)
