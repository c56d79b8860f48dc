"""Defines `outrider demo`: checks that everything is installed, then runs `demo_run`."""

from __future__ import annotations

from typing import Final

from rich.console import Console

from outrider.edge.cli.demo_options import DemoOptions
from outrider.models.bundle.reference_export import EXPORTER_PACKAGES
from outrider.models.process.command_line import takes_options
from outrider.models.process.extras import importing, require_packages

WHAT, EXTRA = "the demo exports, serves and drafts on this machine and", "all"
NEEDED: Final = (*EXPORTER_PACKAGES, "openvino", "httpx", "fastapi", "uvicorn", "prometheus_client", "psutil")
"""Packages of all three parts; checked before the export starts."""


@takes_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """See everything work on this machine: export, cloud, agent, and how the modes compare."""
    require_packages(NEEDED, WHAT, EXTRA)
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.demo_run import run_demo
    run_demo(options, Console())
