"""Linear layers that read the same input, as one product.

T rows; D_in input size; D_out output size of all layers together.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .product import Product
from .stand_in import is_plain_linear, is_stand_in

TOGETHER: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that are called with one and the same tensor, one after the other."""


class FusedLinear:
    """The product of `linears`, computed by the first that is asked and handed out to each once.

    All of them have a bias or none has. The tensors are not doubled: those of `linears` become views of the common
    ones, their values unchanged.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._sizes = [linear.out_features for linear in linears]
        self._product = Product(*self._gather())
        self.multiply: Callable[[Tensor], Tensor] = self._product
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def parts(self) -> list["FusedPart"]:
        """What stands in for each of the layers."""
        return [FusedPart(self, index) for index in range(len(self._linears))]

    @property
    def num_linears(self) -> int:
        """How many layers it computes."""
        return len(self._linears)

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """The outputs of all layers, side by side."""
        self._follow()
        return self.multiply(hidden)

    def take(self, index: int, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, out_features of the layer]
        """The output of layer `index`."""
        if self._input is not hidden:
            self._input = hidden
            self._outputs = list(self(hidden).split(self._sizes, dim=-1))
        output, self._outputs[index] = self._outputs[index], None
        assert output is not None
        if not any(left is not None for left in self._outputs):
            self._input = None
        return output

    def twin(self, form: Callable[[Product], Callable[[Tensor], Tensor]]) -> "FusedLinear":
        """The same layers over the same weight and packed copy, multiplied by `form(product)`."""
        twin = copy.copy(self)
        twin.multiply = form(self._product)
        twin._input, twin._outputs = None, []
        return twin

    @property
    def product(self) -> Product:
        """What multiplies, unless this is a `twin`."""
        self._follow()
        return self._product

    @property
    def first_parameters(self) -> dict[str, nn.Parameter | None]:
        """Of the first layer, read past the module's own lookup, which takes as long as a small operation."""
        return self._linears[0]._parameters

    def _follow(self) -> None:
        weight = self.first_parameters["weight"]
        assert weight is not None
        if weight.data_ptr() != self._product.weight.data_ptr():
            self._product.weight, self._product.bias = self._gather()  # the base was moved, or its dtype changed

    def _gather(self) -> tuple[Tensor, Tensor | None]:  # [D_out, D_in], [D_out]
        of_layers: list[Tensor | None] = [linear.bias for linear in self._linears]
        biases = [bias for bias in of_layers if bias is not None]
        # The bias is part of the product, not added to its rounded result: in 16 bits that would be another number.
        return _as_one([linear.weight for linear in self._linears]), _as_one(biases) if biases else None


class FusedPart:
    """One of the layers of a `FusedLinear`."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        self.fused = fused
        self.index = index

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.fused.take(self.index, hidden)


def fuse_linears(module: nn.Module) -> None:
    """In `module` and below, replace plain linear layers: those that read the same input by one, the others alone.

    Nothing differentiates through them: they are for inference. What stands in for a linear layer stays as it is.
    """
    for child in module.children():
        if not is_stand_in(child):
            fuse_linears(child)
    plain = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    plain = {name: child for name, child in plain.items() if is_plain_linear(child)}
    groups = [
        names
        for names in TOGETHER
        if plain.keys() >= set(names) and len({plain[name].bias is None for name in names}) == 1
    ]
    groups += [(name,) for name in plain if not any(name in names for names in groups)]
    for names in groups:
        parts = FusedLinear([plain[name] for name in names]).parts()
        for name, part in zip(names, parts, strict=True):
            # A plain attribute: a module would have to be one of the tree, with parameters of its own.
            del module._modules[name]
            module.__dict__[name] = part


def fused_products(module: nn.Module) -> Iterator[Product]:
    """Every product below a module that `fuse_linears` went through, each once."""
    for part in module.modules():
        for attribute in vars(part).values():
            if isinstance(attribute, FusedPart) and attribute.index == 0:
                yield attribute.fused.product


def _as_one(parameters: Sequence[Tensor]) -> Tensor:
    """The tensors one behind the other as one; they become views of it where they are not yet."""
    whole = _joined(parameters)
    if whole is None:
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
            parameter.data = part
    return whole


def _joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one where they lie one behind the other already, as another `FusedLinear` left them."""
    first = parameters[0].detach()
    end = first.data_ptr()
    for tensor in parameters:
        is_next = tensor.data_ptr() == end and tensor.is_contiguous()
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(len(tensor) for tensor in parameters), *first.shape[1:]), first.stride())
