"""Opens the verifiers that a command asks: those of `--cloud`, or one on this machine for `--target`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console

from outrider.edge.cli.command_options import ChatOptions, ServeOptions
from outrider.edge.cli.draft_source import Clouds, clouds_of, export_reference_pair
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.lab.own_verifier import OwnVerifier, own_verifier
from outrider.models.bundle.reference_export import AUTO, EXPORTER_PACKAGES, REFERENCE, WIDENED_MB
from outrider.models.cache_folder import expanded
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError
from outrider.models.process.command_line import print_line
from outrider.models.process.extras import require_packages

Result = TypeVar("Result")

SERVER_PACKAGES: Final = ("fastapi", "uvicorn", "prometheus_client")
"""Of the extra `cloud`, beside the runtimes: a bundle names its own."""


@dataclass(frozen=True, slots=True)
class Verifiers:
    """Where to ask. drafts: the values of --draft; with an own verifier the draft beside its target, if none was named.

    own: the verifier of this machine, if it is its own.
    """

    clouds: Clouds
    drafts: Sequence[str]
    own: OwnVerifier | None = None

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """`asyncio.run`; raises RuntimeUnavailable where an own verifier ends before."""
        return asyncio.run(main) if self.own is None else self.own.run(main)


@contextmanager
def open_verifiers(options: RunOptions | ChatOptions | ServeOptions, about: Console) -> Iterator[Verifiers]:
    """The verifiers; starts an own one, and ends it with the context. Raises OutriderError."""
    if options.target is None:
        yield Verifiers(clouds_of(options.cloud, options.keys(), is_steady=options.steady), options.draft)
        return
    target, drafts = _bundles(options, options.target, about)
    with ExitStack() as stack:
        with about.status(f"loading the target {target}", refresh_per_second=1):
            own = stack.enter_context(own_verifier(target))
        print_line(about, f"target: {target}, on this machine at {own.url} until this command ends", "dim")
        yield Verifiers([(own.url, ClientOptions(api_key=own.key))], drafts, own)


def _bundles(options: RunOptions | ChatOptions | ServeOptions, name: str, about: Console) -> tuple[Path, Sequence[str]]:
    """The target's bundle, exported if it is the reference's, and the drafts. Raises as `open_verifiers`."""
    if name != REFERENCE:
        require_packages(SERVER_PACKAGES, "--target", "cloud")
        target = expanded(name)
        if not target.is_dir():
            raise BundleError(
                f"--target is {name!r}, where no bundle is; expected one that `outrider-export target` made, or "
                f"{REFERENCE}"
            )
        beside = target.parent / "draft"
        return target, [str(beside) if each == AUTO and beside.is_dir() else each for each in options.draft]
    require_packages((*SERVER_PACKAGES, *EXPORTER_PACKAGES), f"--target {REFERENCE}", "cloud,export")
    print_line(
        about,
        f"The reference target runs on this machine, widened to {WIDENED_MB:g} MB: a step takes as long as a large "
        "model's, and the text does not change.",
        "dim",
    )
    is_open = not {AUTO, REFERENCE}.isdisjoint(options.draft)
    pair = export_reference_pair(options.choice if is_open else AS_BUNDLED)
    return pair.target, [str(pair.draft) if each in (AUTO, REFERENCE) else each for each in options.draft]
