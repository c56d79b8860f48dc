"""Runs a training pass through `torch.compile`, or through plain PyTorch, with a message, where that does not work.

Both are the same function up to rounding; on a CPU the compiled one is several times as fast, but it needs a C++
compiler, which a user's machine may lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Pass = Callable[..., tuple[Tensor, Tensor]]
"""Takes a model and inputs; returns a loss and the figures to report."""


class BackwardPass:
    """Calls a `Pass` and adds the gradients of its loss to the model's.

    The first call tries compilation. If it fails, `tell` gets the reason and the same call runs without it, so an error
    that has another cause is still raised.
    """

    def __init__(self, function: Pass, *, is_compiled: bool, tell: Callable[[str], None]) -> None:
        self._plain = function
        self._function: Pass = torch.compile(function, dynamic=False) if is_compiled else function
        self._is_tried = not is_compiled
        self._tell = tell
        self.is_compiled = is_compiled

    def __call__(self, model: nn.Module, *inputs: Any) -> Tensor:
        """Runs the pass and returns the figures to report. On the first call the model must have no gradients."""
        if self._is_tried:
            return self._run(model, *inputs)
        self._is_tried = True
        try:
            return self._run(model, *inputs)
        except Exception as error:
            self._function = self._plain
            self.is_compiled = False
            model.zero_grad(set_to_none=True)
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            self._tell(
                f"torch.compile does not work here ({type(error).__name__}: {reason}); training continues without it, "
                "slower, with the same result (usually a C++ compiler is missing)"
            )
        return self._run(model, *inputs)

    def _run(self, model: nn.Module, *inputs: Any) -> Tensor:
        loss, facts = self._function(model, *inputs)
        torch.autograd.backward(loss)
        return facts
