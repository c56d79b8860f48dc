"""`outrider`: the command line on the device."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.edge.cli.demo import demo
from outrider.edge.cli.devices_screen import devices
from outrider.edge.cli.draft_flags import DraftDevice, EmulateNpu, Provider, Runtime
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.results import Mode
from outrider.models.errors import OutriderError, RuntimeUnavailable
from outrider.models.sampling import SamplingParams

app = typer.Typer(
    help="The device side of Outrider: drafts here, the target verifies in the cloud; the text is the target's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from standard input.")],
    draft: Annotated[Path, typer.Option(envvar="OUTRIDER_DRAFT", help="Draft bundle, as outrider-export writes it.")],
    cloud: Annotated[
        list[str] | None,
        typer.Option(help="Verifier's URL; repeat for others to fall back on (default: http://127.0.0.1:8000)."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="How device and cloud share the work.")] = Mode.STREAM,
    draft_device: DraftDevice = None,
    runtime: Runtime = None,
    emulate_npu: EmulateNpu = False,
    provider: Provider = None,
    depth: Annotated[str, typer.Option(help="How far to run ahead: auto, threshold or a number, 0 to 32.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text; drawn and printed if not given.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    patience_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Longest the target waits for a draft; unset: it chooses.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the draft bundle's chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure cloud-only first and print the speed-up.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="Key for the verifier.")] = None,
) -> None:
    """Generate one text: accepted drafted tokens are green, the target's own plain."""
    try:
        from outrider.edge.cli.run import RunOptions, run_once
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    options = RunOptions(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        clouds=tuple(cloud or ["http://127.0.0.1:8000"]),
        draft=draft,
        choice=DraftChoice(runtime, draft_device, emulate_npu, provider),
        mode=mode,
        depth=depth,
        params=SamplingParams(temperature, top_k, top_p, min_p, secrets.randbits(32) if seed is None else seed),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        patience_ms=patience_ms,
        num_threads=threads,
        is_chat=chat,
        compares=compare,
        api_key=api_key,
    )
    run_once(options, Console(), as_json=as_json)


app.command()(demo)
app.command()(devices)


def missing_extra(error: ModuleNotFoundError) -> Exception:
    """What to raise for an import that failed: for a package that an extra installs, the command that installs it."""
    if error.name is None or error.name.startswith("outrider"):
        return error  # a bug of ours, not a missing package
    return RuntimeUnavailable(
        f'the agent needs the package {error.name!r}, which is not installed; run: pip install "outrider[edge]"'
    )


def main() -> None:
    """The console script. An error that is the user's to mend is one red line and exit code 2."""
    try:
        app()
    except OutriderError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
