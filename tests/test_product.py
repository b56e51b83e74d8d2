"""The product is the product, whatever its form."""

import pytest
import torch
from torch.nn import functional as F

from hispec.heads.product import Product, can_pack


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("leading", [(), (1,)])
@torch.no_grad()
def test_it_equals_linear(is_packed, dtype, num_rows, has_bias, leading):
    hidden, weight = make(*leading, num_rows, 5, dtype=dtype), make(6, 5, dtype=dtype, seed=1)
    bias = make(6, dtype=dtype, seed=2) if has_bias else None
    product = Product(weight, bias)
    if is_packed:
        product.pack()
    output = product(hidden)
    expected = F.linear(hidden, weight, bias)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this machine has no packed bfloat16 product")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 16, 33])
@torch.no_grad()
def test_packed_bfloat16_is_linear_to_the_bit_and_row_by_row(num_rows):
    hidden, weight = make(num_rows, 192, dtype=torch.bfloat16), make(256, 192, dtype=torch.bfloat16, seed=1)
    product = Product(weight)
    product.pack()
    assert product._packed is not None
    output = product(hidden)
    assert torch.equal(output, F.linear(hidden, weight))
    assert torch.equal(output, torch.cat([product(row.unsqueeze(0)) for row in hidden]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_packed_copy_follows_its_weight(dtype):
    hidden, parameter = make(4, 5), torch.nn.Parameter(make(6, 5, seed=1))
    product = Product(parameter)
    product.pack()
    parameter.mul_(2)
    torch.testing.assert_close(product(hidden), F.linear(hidden, parameter))
    parameter.data = make(6, 5, dtype=dtype, seed=2)
    hidden = hidden.to(dtype)
    torch.testing.assert_close(product(hidden), F.linear(hidden, parameter))


@torch.no_grad()
def test_a_type_without_a_packed_product_takes_the_usual_call():
    product = Product(make(6, 5, dtype=torch.float64, seed=1))
    product.pack()
    hidden = make(3, 5, dtype=torch.float64)
    torch.testing.assert_close(product(hidden), F.linear(hidden, product.weight))


@pytest.mark.parametrize("is_packed", [False, True])
def test_it_differentiates(is_packed):
    hidden, weight = make(2, 5).requires_grad_(), make(6, 5, seed=1).requires_grad_()
    product = Product(weight)
    if is_packed:
        product.pack()
    product(hidden).square().sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    F.linear(hidden, weight).square().sum().backward()
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad))
