"""Fixtures: tiny random models."""

import os
from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedModel

from hispec.heads import find_kernels

from .models import ARCHITECTURE_NAMES, build_base


@pytest.fixture(scope="session", params=ARCHITECTURE_NAMES)
def any_base(request: pytest.FixtureRequest) -> PreTrainedModel:
    """One tiny base for each architecture and variant."""
    return build_base(request.param)


@pytest.fixture(scope="session")
def base() -> PreTrainedModel:
    """A tiny Llama."""
    return build_base("llama")


@pytest.fixture(scope="session")
def make_base() -> Callable[..., PreTrainedModel]:
    """Build a tiny base by architecture name, with changes to its config."""
    return build_base


@pytest.fixture
def without_kernels() -> Iterator[None]:
    """As on a machine that cannot compile our own kernels."""
    before = os.environ.get("HISPEC_KERNELS")
    os.environ["HISPEC_KERNELS"] = "0"
    find_kernels.cache_clear()
    yield
    del os.environ["HISPEC_KERNELS"]
    if before is not None:
        os.environ["HISPEC_KERNELS"] = before
    find_kernels.cache_clear()
