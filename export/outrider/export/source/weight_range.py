"""Checks that the chosen precision can hold every weight of a source.

Casting would turn larger weights into infinities (torch) or clip them silently (OpenVINO), and quantizing would give a
whole row a scale that is not finite. Knows files and numbers, not what the tensors are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.models.bundle.manifest import Precision
from outrider.models.errors import ExportError

FP16_MAX: Final = 65_504.0
BF16_MAX: Final = (2 - 2**-7) * 2.0**127

# Scales of integers are kept in FP16 by some formats: 255 steps of INT8, or 15 of INT4, reach from -limit to +limit.
_LARGEST: Final[dict[Precision, float]] = {
    "fp32": math.inf,
    "bf16": BF16_MAX,
    "fp16": FP16_MAX,
    "int8": FP16_MAX * 255 / 2,
    "w8a8": FP16_MAX * 255 / 2,
    "int4": FP16_MAX * 15 / 2,
}


def require_range(weight_files: Sequence[Path], precision: Precision) -> None:
    """Reads every floating-point tensor once, one at a time.

    Raises ExportError naming the first tensor that holds a NaN, an infinity, or a weight beyond what `precision` takes.
    """
    limit = _LARGEST[precision]
    for path in weight_files:
        with quiet_upstream(f"reading {path.name}"):
            import torch
            from safetensors import safe_open

            opened: Any = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
            with opened as file:
                for name in sorted(file.keys()):
                    tensor = file.get_tensor(name)
                    if not tensor.is_floating_point() or not tensor.numel():
                        continue
                    low, high = (float(end) for end in torch.aminmax(tensor))
                    if not (math.isfinite(low) and math.isfinite(high)):
                        raise ExportError(
                            f"{path}: the tensor {name} holds weights that are not finite numbers; the model is "
                            "broken: download it again"
                        )
                    if max(-low, high) > limit:
                        raise ExportError(
                            f"{path}: the tensor {name} holds {max(high, low, key=abs):.6g}, beyond the {limit:.6g} "
                            f"that {precision} can hold; try --precision bf16 or fp32, which hold more"
                        )
