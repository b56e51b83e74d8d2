"""Steps of our own kernels, done one after the other in a single call.

Between two calls Python and torch run, whose code the weights of the first have driven out of the machine's caches:
some hundred microseconds, where a drafted token's products take as long.
"""

import ctypes
from typing import TypeVar

from torch import Tensor

from .kernel_types import Drawn, Highest, Native, Step, StepOfKind
from .kernels import find_kernels

Output = TypeVar("Output")


class NotNative(Exception):  # noqa: N818  it is told, not failed
    """Our own kernels do not take a step."""


class StepChain:
    """Collects steps; what they give means nothing before `run`."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._told: ctypes.Array[StepOfKind] | None = None

    def add(self, native: Native[Output] | None) -> Output:
        """Put steps at the end; what they will give. Raises NotNative where there are none."""
        if native is None:
            raise NotNative
        self._steps += native.steps
        return native.output

    def add_draft(
        self,
        body: "StepChain",  # see `Kernels.draft_step`, as the others
        counts: Tensor,
        token_ids: Tensor,
        *,
        may_end: bool,
        with_probabilities: bool,
    ) -> Drawn:
        """Draw tokens behind those of the step at the end, which finds the highest logits."""
        kernels = find_kernels()
        assert kernels is not None
        drawn = kernels.draft_step(
            self._steps[-1], body._steps, counts, token_ids, may_end=may_end, with_probabilities=with_probabilities
        )
        return self.add(drawn)

    def __len__(self) -> int:
        return len(self._steps)

    def run(self) -> None:
        """Do them; again, where it was done before."""
        kernels = find_kernels()
        assert kernels is not None
        if self._told is None:
            self._told = kernels.tell(self._steps)
        kernels.run(self._told, self._steps[0].dtype)

    def seconds(self, first: int) -> float:
        """What the steps from `first` on have taken."""
        assert self._told is not None
        return sum(step.seconds for step in self._told[first:])


def highest_step(
    logits: Tensor,  # [R, V]
    names: Tensor | None,  # [V] int64, what places are called
    *,
    with_probabilities: bool,
    number: Tensor | None = None,  # as of `StateRows`
) -> Native[Highest] | None:
    """The highest logits as a step; None where there are no kernels for them."""
    kernels = find_kernels()
    if kernels is None or not kernels.takes(logits):
        return None
    return kernels.highest_step(logits, names, with_probabilities=with_probabilities, number=number)


def run_native(native: Native[Output]) -> Output:
    """Do steps at once; what they give."""
    chain = StepChain()
    output = chain.add(native)
    chain.run()
    return output
