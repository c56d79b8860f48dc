"""`outrider run`: one generation from the terminal."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from outrider.edge.cli.summary import draft_lines, result_as_json, summary_lines
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.client import ClientOptions, CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import OpenDraft, make_agent, make_depth, open_draft_bundle, open_drafter
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens
from outrider.models.errors import ConfigError
from outrider.models.sampling import SamplingParams
from outrider.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything `outrider run` was told. clouds: endpoints in order of preference. depth: as `make_depth` reads it.

    Raises ConfigError for what contradicts itself.
    """

    prompt: str
    clouds: tuple[str, ...]
    draft: Path
    choice: DraftChoice
    mode: Mode
    depth: str
    params: SamplingParams
    max_tokens: int
    ignore_eos: bool
    patience_ms: float | None
    num_threads: int
    is_chat: bool
    compares: bool
    api_key: str | None

    def __post_init__(self) -> None:
        if self.mode is Mode.CLOUD_ONLY and self.choice != AS_BUNDLED:
            raise ConfigError("nothing drafts with --mode cloud-only; leave out what chooses the draft")


def run_once(options: RunOptions, console: Console, *, as_json: bool) -> None:
    """Generates, shows and sums up; raises OutriderError."""
    make_depth(options.depth, Estimates())  # a wrong depth is found before a model is loaded
    bundle = open_draft_bundle(options.draft)
    tokenizer = bundle.tokenizer()
    request = make_request(options, tokenizer, bundle.manifest.tokenizer_fingerprint)
    is_drafted = options.mode is not Mode.CLOUD_ONLY
    draft = open_drafter(bundle, options.choice, options.num_threads) if is_drafted else None
    printer = None if as_json else TokenPrinter(console, tokenizer.detokenizer(context=request.prompt))
    with closing(draft.drafter) if draft is not None else nullcontext():
        if draft is not None and not as_json:
            for note in draft.placement.notes:
                console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
        result, baseline = asyncio.run(_generate(options, request, draft, printer))
    speed_up = result.tokens_per_s / baseline.tokens_per_s if baseline is not None else None
    if printer is None:
        document = result_as_json(result, tokenizer.decode(result.tokens)) | {"seed": options.params.seed}
        document["draft"] = draft.placement.as_json() if draft is not None else None
        if baseline is not None:
            cloud_only = result_as_json(baseline, tokenizer.decode(baseline.tokens))
            document |= {"cloud_only": cloud_only, "speed_up": speed_up, "identical": baseline.tokens == result.tokens}
        console.print_json(json.dumps(document))
        return
    printer.finish()
    lines = summary_lines(result)
    if draft is not None:
        lines += draft_lines(draft.placement, len(request.prompt), len(result.tokens))
    for line in [*lines, *(summary_lines(baseline) if baseline is not None else [])]:
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    if baseline is not None:
        same = (
            "the same text" if baseline.tokens == result.tokens else "ANOTHER TEXT (a near-tie in rounding, or a bug)"
        )
        console.print(f"{speed_up:.2f}x of cloud-only, {same}", style="bold", highlight=False)
    console.print(f"seed {options.params.seed}", style="dim", highlight=False)


def make_request(options: RunOptions, tokenizer: Tokenizer, fingerprint: str) -> GenerationRequest:
    """The text to ask for. stop_ids stay unset: the target's own end tokens rule, which need not be the draft's."""
    text = options.prompt
    if options.is_chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return GenerationRequest(
        prompt=tuple(tokenizer.encode(text, add_special_tokens=not options.is_chat)),
        params=options.params,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        patience_ms=options.patience_ms,
        tokenizer=fingerprint,
    )


async def _generate(
    options: RunOptions, request: GenerationRequest, draft: OpenDraft | None, on_tokens: OnTokens | None
) -> tuple[GenerationResult, GenerationResult | None]:
    async with AsyncExitStack() as stack:
        client_options = ClientOptions(api_key=options.api_key)
        clients = [await stack.enter_async_context(CloudClient(url, client_options)) for url in options.clouds]
        endpoints = Endpoints(clients)
        baseline = await make_agent(Mode.CLOUD_ONLY, endpoints, None).generate(request) if options.compares else None
        agent = make_agent(options.mode, endpoints, draft.drafter if draft is not None else None, options.depth)
        return await agent.generate(request, on_tokens), baseline
