"""The product is the product, whatever its form."""

import pytest
import torch
from torch.nn import functional as F

from hispec.heads.product import product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("bias", [None, torch.randn(6)])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_it_equals_linear(dtype, num_rows, bias, leading):
    hidden = torch.randn(*leading, num_rows, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    output = product(hidden, weight, bias)
    expected = F.linear(hidden, weight, bias)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


def test_it_differentiates():
    hidden, weight = torch.randn(2, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    product(hidden, weight).square().sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    F.linear(hidden, weight).square().sum().backward()
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad))
