"""A worker extension whose hash has another constant, as a build with a wrong kernel would have."""

from __future__ import annotations

from typing import Any

from outrider.cloud.vllm.extension import OutriderExtension
from outrider.models.picks import noise_torch


class PlantedExtension(OutriderExtension):
    """`worker_extension_cls`."""

    def outrider_install(self) -> dict[str, Any]:
        noise_torch._TOKEN_FACTOR += 2  # type: ignore[misc]
        return super().outrider_install()
