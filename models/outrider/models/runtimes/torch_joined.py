"""Joins linear layers that read the same rows: one larger product in a step of few tokens, whose time is its launches
and the reading of its weights.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' code calls with the same rows, in the order of its calls."""


class _Product:
    """Linear layers as one: their weights one below the other."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self._rows: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """What layer `index` gives. All are computed for the first one, and let go with the last."""
        if rows is not self._rows:
            self._rows = rows
            self._parts = torch.split(torch.nn.functional.linear(rows, self.weight, self.bias), self.sizes, dim=-1)
        found = self._parts[index]
        if index == len(self.sizes) - 1:
            self._rows, self._parts = None, ()
        return found


class _Part(torch.nn.Module):
    """In the place of one of the layers; its weights are a part of the product's."""

    def __init__(self, product: _Product, index: int, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._product, self._index = product, index
        self.weight = torch.nn.Parameter(torch.split(product.weight, product.sizes)[index], requires_grad=False)
        self.bias = layer.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """values [..., in] to [..., out], of their dtype."""
        return self._product.part(self._index, values)


def join(model: Any) -> None:
    """Joins what can be in a model that stays where it is; the new weights take the place of the old ones."""
    # Only parents: a list of all modules would hold each old weight until the end.
    firsts = {names[0] for names in _GROUPS}
    parents = [module for module in model.modules() if not firsts.isdisjoint(dict(module.named_children()))]
    for parent in parents:
        for names in _GROUPS:
            layers = [layer for name in names if type(layer := getattr(parent, name, None)) is torch.nn.Linear]
            if len(layers) == len(names) and _are_alike(layers):
                product = _Product(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, _Part(product, index, layers[index]))


def _are_alike(layers: list[torch.nn.Linear]) -> bool:
    return len({(each.in_features, each.weight.dtype, each.bias is None) for each in layers}) == 1
