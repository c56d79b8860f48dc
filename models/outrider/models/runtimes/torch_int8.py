"""Linear layers with INT8 weights for the torch runtime: half the memory to read in a step of few tokens.

Each output has a scale of its own, max(abs(weights)) / 127; activations keep their type. On CUDA a kernel in Triton
reads the integers (`triton_rows`), for few rows, and for all with the order of sums that `--exact bitwise` promises.
The LM head stays as it is, and of a mixture the router and the experts.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from outrider.models.errors import BundleError

_MOST_ROWS: Final = 256
"""More rows are faster as a product of widened weights."""
_ROUTERS: Final = ("gate", "router", "wg", "classifier")
"""Names of what chooses experts: little memory, and a choice that rounding would change. `*_gate`, too."""


@torch.library.custom_op("outrider::int8_matmul", mutates_args=())
def int8_matmul(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """rows [M, K] times weight int8 [N, K], each output times its scale float32 [N]: [M, N] of rows' dtype."""
    from outrider.models.runtimes.triton_rows import matmul

    return matmul(rows, weight.t(), scale=scale)


@int8_matmul.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


class Int8Linear(torch.nn.Module):
    """In the place of `linear`, on `device`. in_order: each row's sum has one order, whatever the number of rows.

    It has no `weight`: code that reads one instead of calling the layer fails when the model is loaded.
    """

    integers: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, device: torch.device, *, in_order: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self._in_order = linear.in_features, linear.out_features, in_order
        weight = linear.weight.detach().to(device).float()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("integers", (weight / scale[:, None]).round_().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """values [..., in] to [..., out], of their dtype."""
        rows = values.reshape(-1, self.in_features)
        if values.is_cuda and (self._in_order or rows.shape[0] <= _MOST_ROWS):
            found: torch.Tensor = int8_matmul(rows, self.integers, self.scale)
        else:
            found = (torch.nn.functional.linear(rows, self.integers.to(rows.dtype)) * self.scale).to(rows.dtype)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*values.shape[:-1], self.out_features)


def quantize(model: Any, device: torch.device, *, in_order: bool) -> None:
    """Puts `Int8Linear`, on `device`, in the place of all linear layers but the LM head and routers.

    Raises BundleError where there is none.
    """
    head = model.get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and child is not head and not (name in _ROUTERS or name.endswith("_gate"))
    ]
    if not found:
        raise BundleError(f"{model.config.model_type} has no linear layers of torch's own, so INT8 changes nothing")
    while found:  # so that each original is let go before the next is made
        parent, name, child = found.pop()
        setattr(parent, name, Int8Linear(child, device, in_order=in_order))
