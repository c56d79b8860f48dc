"""Runs `outrider-export`: turns models into checked bundles."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from click.core import ParameterSource

from outrider.export.cli.display import report, report_sweep, show_progress
from outrider.export.cli.families import families
from outrider.export.cli.training import SameTokenizer, distill
from outrider.export.make.pair import DEFAULT_RTT_MS, Judging, PairOptions, export_pair, named_source
from outrider.export.make.pipeline import export_model
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.make.sweep import sweep_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.card_html import REPORT_NAME, PageWriter, write_card_html
from outrider.export.source.prompts import read_prompts
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Device, Precision, StaticShapes
from outrider.models.bundle.reference_export import REFERENCE, WIDENED_MB
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import make_app, run_app

app = make_app("Turn models into checked bundles: a draft for the device, a target for the cloud.")

TargetRuntime = Literal["openvino", "torch"]
TargetDevice = Literal["cpu", "gpu"]
Chosen = Annotated[
    Precision | None, typer.Option(help="Precision of the weights; default: that of device and runtime.")
]
DraftOn = Annotated[Device, typer.Option(help="Device that runs the draft.")]
DraftWith = Annotated[
    Literal["openvino", "onnxruntime"] | None, typer.Option(help="Runtime of the draft; default: the device's.")
]
PromptLen = Annotated[
    int | None,
    typer.Option(
        min=1, help="NPU only: positions for the prompt, fixed at export; a text has at most these and --response-len."
    ),
]
ResponseLen = Annotated[int | None, typer.Option(min=1, help="NPU only: positions for what follows the prompt.")]
StepLen = Annotated[
    int | None, typer.Option(min=1, help="NPU only: most tokens of one pass, as nodes of a tree; default: 8.")
]
AheadOfTime = Annotated[
    bool,
    typer.Option(
        "--ahead-of-time", help="NPU only: compile on this machine; otherwise the device does at its first run."
    ),
]
Platform = Annotated[str | None, typer.Option(help="With --ahead-of-time: the NPU to compile for, such as NPU4000.")]
MaxPositions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest sequence in tokens; default: the model's. A model with longrope scaling is exported up to its "
        "original length.",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the bundle; default: the source's name.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing bundles.")]
Json = Annotated[bool, typer.Option("--json", help="Print the manifest as JSON, without progress.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads for the checks; 0 leaves it to the runtime.")]
Widen = Annotated[
    float | None,
    typer.Option(
        "--widen",
        min=0.0,
        metavar="MB",
        help="Widen the target to this size in FP32; its text stays the same; 0: as it is. Default of the pair "
        f"'{REFERENCE}': {WIDENED_MB:g}; of others: 0.",
    ),
]

CACHE_TAKES: Final = frozenset({
    "draft", "target", "cached", "as_json", "widen", "target_precision", "draft_precision", "draft_device",
    "draft_runtime", "prompt_len", "response_len", "step_len",
})  # fmt: skip
"""Parameters of `pair` that --cached takes: those that its key holds, and how it prints."""


@app.command()
def pair(
    ctx: typer.Context,
    draft: Annotated[
        str, typer.Argument(help=f"Draft: directory, hub id, or '{REFERENCE}', alone for both.")
    ] = REFERENCE,
    target: Annotated[str | None, typer.Argument(help=f"Its target: likewise, or '{REFERENCE}'.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Bundles go to OUT/draft and OUT/target.")] = Path("bundles"),
    draft_device: DraftOn = "cpu",
    draft_runtime: DraftWith = None,
    draft_precision: Chosen = None,
    prompt_len: PromptLen = None,
    response_len: ResponseLen = None,
    step_len: StepLen = None,
    ahead_of_time: AheadOfTime = False,
    npu_platform: Platform = None,
    max_positions: MaxPositions = None,
    target_device: Annotated[TargetDevice, typer.Option(help="Device that runs the target.")] = "cpu",
    target_runtime: Annotated[TargetRuntime | None, typer.Option(help="Runtime of the target.")] = None,
    target_precision: Chosen = None,
    widen: Widen = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts for the acceptance rate: JSON, JSONL or text; all are used.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are user messages: apply the target's chat template.")
    ] = False,
    step_ms: Annotated[
        float | None, typer.Option(help="Target's time per token in ms where it will run; default: measured here.")
    ] = None,
    extra_ms: Annotated[float | None, typer.Option(help="Time that a drafted token adds to it, in ms.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Export the draft in every way that fits its device; keep the best.")
    ] = False,
    rtt_ms: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="With --sweep: round trip in ms at which drafts are compared; repeatable."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="With --sweep: keep the other drafts, in OUT/sweep.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Write the pair even if its draft is accepted too rarely or cannot write its text."
        ),
    ] = False,
    same_tokenizer: SameTokenizer = False,
    cached: Annotated[
        bool,
        typer.Option(
            "--cached",
            help=f"Only '{REFERENCE}': export it to the user's cache, once, and print where it is. With --json, "
            "progress is shown all the same.",
        ),
    ] = False,
    threads: Threads = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export a draft and its target, checked against each other, with a report card in OUT/report.html."""
    if cached:
        _require_cacheable(ctx, draft, target)
    if (rtt_ms or keep) and not sweep:
        raise ConfigError("--rtt-ms and --keep are for several drafts; add --sweep, or leave them out")
    if target is None and draft != REFERENCE:
        raise ConfigError(f"only one model was given ({draft}); name draft and target, or '{REFERENCE}'")
    draft_source, target_source = named_source(draft, "draft"), named_source(target or draft, "target")
    if draft == REFERENCE and target is None:
        if widen is None:
            widen = WIDENED_MB
            typer.echo(
                f"The reference target is widened to {widen:g} MB so that a step takes as long as a large model's; "
                "its text does not change. --widen 0 leaves it as it is.",
                err=True,
            )
        if widen and target_precision is None:
            target_precision = "fp32"
    draft_options = ExportOptions(
        "draft",
        draft_precision,
        draft_runtime,
        num_threads=threads,
        overwrite=overwrite,
        device=draft_device,
        static_shapes=_shapes(prompt_len, response_len, step_len),
        compiles_ahead=ahead_of_time,
        npu_platform=npu_platform,
        max_positions=max_positions,
    )
    if cached:
        with show_progress(is_quiet=False) as progress:
            kept = export_reference_pair(
                widen_mb=widen or None,
                target_precision=target_precision or "fp32",
                draft=draft_options,
                progress=progress,
            )
        places = {"draft": str(kept.draft), "target": str(kept.target)}
        typer.echo(json.dumps(places) if as_json else "\n".join(f"{role}: {at}" for role, at in places.items()))
        return
    target_options = ExportOptions(
        "target",
        target_precision,
        target_runtime,
        widen or None,
        num_threads=threads,
        overwrite=overwrite,
        device=target_device,
        max_positions=max_positions,
    )
    options = PairOptions(draft_options, target_options)
    judging = Judging(
        read_prompts(prompts) if prompts is not None else None,
        chat,
        step_ms,
        extra_ms,
        tuple(rtt_ms or (DEFAULT_RTT_MS,)),
        is_forced=force,
        same_tokenizer=same_tokenizer,
    )
    page = PageWriter(out / REPORT_NAME, overwrite=overwrite)
    given = (draft_source, target_source, out)
    with show_progress(is_quiet=as_json) as progress:
        if sweep:
            swept = sweep_pair(*given, options=options, judging=judging, keeps_all=keep, page=page, progress=progress)
        else:
            bundles = export_pair(*given, options=options, judging=judging, page=page, progress=progress)
    if sweep:
        report_sweep(swept, as_json=as_json, page=page.path)
    else:
        report(bundles, as_json=as_json, page=page.path)
    if not as_json:
        # The command that serves the pair; it prints the one that runs it.
        typer.echo(f"Serve it: outrider-cloud serve {shlex.quote(str(out / 'target'))}")


@app.command()
def draft(
    model: Annotated[str, typer.Argument(help=f"Model directory, hub id, or '{REFERENCE}'.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the bundle.")] = Path("bundles/draft"),
    device: DraftOn = "cpu",
    runtime: DraftWith = None,
    precision: Chosen = None,
    prompt_len: PromptLen = None,
    response_len: ResponseLen = None,
    step_len: StepLen = None,
    ahead_of_time: AheadOfTime = False,
    npu_platform: Platform = None,
    max_positions: MaxPositions = None,
    name: Name = None,
    threads: Threads = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export one model as a draft."""
    options = ExportOptions(
        "draft",
        precision,
        runtime,
        name=name,
        num_threads=threads,
        overwrite=overwrite,
        device=device,
        static_shapes=_shapes(prompt_len, response_len, step_len),
        compiles_ahead=ahead_of_time,
        npu_platform=npu_platform,
        max_positions=max_positions,
    )
    _export(model, out, options, as_json=as_json)


@app.command()
def target(
    model: Annotated[str, typer.Argument(help=f"Model directory, hub id, or '{REFERENCE}'.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the bundle.")] = Path("bundles/target"),
    device: Annotated[TargetDevice, typer.Option(help="Device that runs the target.")] = "cpu",
    runtime: Annotated[TargetRuntime | None, typer.Option(help="Runtime of the target; default: the device's.")] = (
        None
    ),
    precision: Chosen = None,
    widen: Widen = None,
    max_positions: MaxPositions = None,
    name: Name = None,
    threads: Threads = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export one model as a target."""
    options = ExportOptions(
        "target",
        precision,
        runtime,
        widen or None,
        name=name,
        num_threads=threads,
        overwrite=overwrite,
        device=device,
        max_positions=max_positions,
    )
    _export(model, out, options, as_json=as_json)


app.command()(families)


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    html: Annotated[Path | None, typer.Option(help="Also write the report card to this file, as HTML.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a bundle's files and show its report card."""
    opened = Bundle.open(bundle)
    opened.tokenizer()  # raises if it is not the one in the manifest
    if html is not None:
        is_draft = opened.manifest.role == "draft"
        write_card_html(html, [opened.manifest] if is_draft else [], None if is_draft else opened.manifest)
    report((opened,), as_json=as_json, page=html)


app.command()(distill)


def _export(model: str, out: Path, options: ExportOptions, *, as_json: bool) -> None:
    """Exports one model and shows its report card."""
    with show_progress(is_quiet=as_json) as progress:
        bundle = export_model(named_source(model, options.role), out, options, progress)
    report((bundle,), as_json=as_json)


def _shapes(prompt_len: int | None, response_len: int | None, step_len: int | None) -> StaticShapes | None:
    """The given lengths, defaults for the others; None if none was given."""
    asked = {"prompt_len": prompt_len, "response_len": response_len, "step_len": step_len}
    given = {name: length for name, length in asked.items() if length is not None}
    return StaticShapes(**given) if given else None


def _require_cacheable(ctx: typer.Context, draft: str, target: str | None) -> None:
    """Raises ConfigError for other models than the reference pair, and for options that --cached does not take."""
    if draft != REFERENCE or target is not None:
        raise ConfigError(f"--cached keeps the pair '{REFERENCE}' only; leave DRAFT and TARGET out")
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    refused = [
        max(parameter.opts, key=len)
        for parameter in ctx.command.params
        if parameter.name is not None
        and parameter.name not in CACHE_TAKES
        and ctx.get_parameter_source(parameter.name) not in defaults
    ]
    if refused:
        raise ConfigError(f"--cached does not take {', '.join(refused)}; leave out these or --cached")


def main() -> None:
    """The console script: a user's mistake ends in one red message and exit status 2, never in a traceback."""
    # Raises, so that what was half built is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_app(app, what="exporting", extra="export")


if __name__ == "__main__":
    main()
