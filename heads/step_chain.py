"""Steps of our own kernels, done one after the other in a single call.

Between two calls Python and torch run, whose code the weights of the first have driven out of the machine's caches:
some hundred microseconds, where a drafted token's products take as long.
"""

from typing import TypeVar

from torch import Tensor

from .kernel_types import Highest, Native, Step
from .kernels import find_kernels

Output = TypeVar("Output")


class NotNative(Exception):  # noqa: N818  it is told, not failed
    """Our own kernels do not take a step."""


class StepChain:
    """Collects steps; what they give means nothing before `run`."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def add(self, native: Native[Output] | None) -> Output:
        """Put steps at the end; what they will give. Raises NotNative where there are none."""
        if native is None:
            raise NotNative
        self._steps += native.steps
        return native.output

    def run(self) -> None:
        """Do them."""
        kernels = find_kernels()
        assert kernels is not None
        kernels.run(self._steps)


def highest_step(
    logits: Tensor,  # [R, V]
    names: Tensor | None,  # [V] int64, what places are called
    *,
    with_probabilities: bool,
    latest: Tensor | None = None,  # [R] int64, where the ids are put as well
) -> Native[Highest] | None:
    """The highest logits as a step; None where there are no kernels for them."""
    kernels = find_kernels()
    if kernels is None or not kernels.takes(logits):
        return None
    return kernels.highest_step(logits, names, with_probabilities=with_probabilities, latest=latest)


def run_native(native: Native[Output]) -> Output:
    """Do steps at once; what they give."""
    chain = StepChain()
    output = chain.add(native)
    chain.run()
    return output
