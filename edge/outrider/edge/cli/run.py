"""Runs one generation from the terminal.

The text goes to standard output, statistics and messages to standard error.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, closing, nullcontext
from dataclasses import dataclass

from rich.console import Console

from outrider.edge.cli.compare import CLOUD_ONLY, DRAFTED, Comparison, compare_modes
from outrider.edge.cli.docs import open_library
from outrider.edge.cli.draft_source import Clouds, clouds_of, find_draft
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import draft_lines, result_as_json, summary_lines
from outrider.edge.cli.terminal import TokenPrinter, print_document
from outrider.edge.cli.undrafted import why_undrafted
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.client import CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import (
    Agent,
    OpenDraft,
    make_agent,
    make_depth,
    make_options,
    open_draft_bundle,
    open_drafter,
)
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.edge.retrieval.grounding import Grounding
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.auto import AUTO
from outrider.edge.tracing import start_tracing
from outrider.models.command_line import print_line
from outrider.models.detokenizer import StreamingDetokenizer
from outrider.models.errors import ConfigError
from outrider.models.reference_export import REFERENCE
from outrider.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ran:
    """The generation that was shown, and the one whose numbers are reported.

    They differ with --compare: the first warms everything up, so a typical one of the rounds is reported. undrafted:
    why the draft contributed nothing; None if it did.
    """

    shown: GenerationResult
    result: GenerationResult
    undrafted: str | None
    comparison: Comparison | None


def run_once(options: RunOptions, out: Console, about: Console, keys: Keys | None = None) -> None:
    """Generates a text, shows it and its statistics; raises OutriderError. out: the text. about: everything else.

    keys: which key goes to which cloud; by default, the options' key goes to all of them.
    """
    keys = keys or Keys(options.api_key)
    make_depth(options.depth, Estimates())  # a wrong option is found before a model is loaded
    make_options(options.width)
    clouds = clouds_of(options.cloud, keys)
    if options.draft in (AUTO, REFERENCE) and not options.prompt:
        raise ConfigError("the prompt is empty; expected a text to continue")  # before an export of minutes
    bundle = open_draft_bundle(find_draft(options.draft, options.choice, clouds, about))
    tokenizer = bundle.tokenizer()
    grounding = None
    if options.docs is not None and options.prompt is not None:
        library = open_library(options.docs, options.docs_tokens, tokenizer, about)
        grounding = library.ground(options.prompt)
    request = make_request(options, tokenizer, bundle.manifest.tokenizer_fingerprint, grounding)
    is_drafted = options.mode is not Mode.CLOUD_ONLY
    draft = open_drafter(bundle, options.choice, options.threads) if is_drafted else None
    printer = None if options.as_json else _printer(out, options, tokenizer.detokenizer(context=request.prompt))
    with closing(draft.drafter) if draft is not None else nullcontext():
        if draft is not None:
            for note in draft.placement.notes:
                print_line(about, f"note: {note}", "yellow")
        end_tracing = start_tracing(lambda words: print_line(about, words, "yellow"))
        try:
            ran = asyncio.run(_generate(options, clouds, request, draft, printer, about, grounding))
        finally:
            end_tracing()
            if printer is not None:
                printer.break_line()  # an error or Ctrl-C may have interrupted the text
    if options.as_json:
        document = _document(options, ran, draft, tokenizer)
        if grounding is not None:
            document |= {"passages": grounding.as_json(), "passage_tokens": grounding.num_tokens}
        print_document(out, document)
        return
    for line in [*_lines(options, request, ran, draft), *_passage_lines(options, grounding)]:
        print_line(about, line, "dim")
    if ran.undrafted is not None:
        print_line(about, ran.undrafted, "yellow")
    if ran.comparison is not None:
        print_line(about, ran.comparison.sentence(options.mode.value), "bold")
        if ran.comparison.load is not None:
            print_line(about, ran.comparison.load, "yellow")
    print_line(about, f"seed {options.params.seed}", "dim")


def _printer(out: Console, options: RunOptions, detokenizer: StreamingDetokenizer) -> TokenPrinter:
    """Shows the prompt too on a terminal; a file or a pipe gets the generated text only."""
    prompt = options.prompt if out.is_terminal and options.prompt else ""
    return TokenPrinter(out, detokenizer, f"{prompt}\n" if prompt and options.chat else prompt)


def make_request(
    options: RunOptions, tokenizer: Tokenizer, fingerprint: str, grounding: Grounding | None = None
) -> GenerationRequest:
    """The request for the prompt. stop_ids stay unset: the target's end tokens count, not the draft's."""
    assert options.prompt is not None
    text = options.prompt if grounding is None else grounding.before + options.prompt
    if options.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return GenerationRequest(
        prompt=tuple(tokenizer.encode(text, add_special_tokens=not options.chat)),
        params=options.params,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        patience_ms=options.patience_ms,
        tokenizer=fingerprint,
    )


async def _generate(
    options: RunOptions,
    clouds: Clouds,
    request: GenerationRequest,
    draft: OpenDraft | None,
    printer: TokenPrinter | None,
    about: Console,
    grounding: Grounding | None = None,
) -> Ran:
    def warn(words: str) -> None:
        if printer is not None:
            printer.break_line()
        print_line(about, words, "yellow")

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(CloudClient(url, each)) for url, each in clouds]
        endpoints = Endpoints(clients, on_trouble=warn)
        await endpoints.compare_targets()
        drafter = draft.drafter if draft is not None else None
        tree = make_options(options.width, options.effort, options.draft_bytes, options.lookup is not False)
        quoted = grounding.quoted if grounding is not None else ()
        agent = make_agent(options.mode, endpoints, drafter, options.depth, tree, quoted=quoted)
        result = await agent.generate(request, printer)
        if printer is not None:
            printer.finish()
        comparison = await _compare(options, request, agent, endpoints, about) if options.compare else None
        counted = comparison.typical[DRAFTED] if comparison is not None else result
        longest = draft.placement.max_positions if draft is not None else None
        return Ran(result, counted, why_undrafted(counted, agent, longest, len(request.prompt)), comparison)


async def _compare(
    options: RunOptions, request: GenerationRequest, agent: Agent, endpoints: Endpoints, about: Console
) -> Comparison:
    cloud_only = make_agent(Mode.CLOUD_ONLY, endpoints, None)
    # Drawn seldom, because that takes processor time from what is measured.
    with about.status("comparing with cloud-only", refresh_per_second=1) as status:

        def show(num_done: int) -> None:
            status.update(f"comparing with cloud-only: {num_done} of {options.repeat} rounds")

        return await compare_modes(agent, cloud_only, request, options.repeat, options.cloud, show)


def _lines(options: RunOptions, request: GenerationRequest, ran: Ran, draft: OpenDraft | None) -> list[str]:
    lines = summary_lines(ran.result)
    if draft is not None:
        lines += draft_lines(draft.placement, len(request.prompt), len(ran.result.tokens))
    if ran.comparison is not None:
        lines += summary_lines(ran.comparison.typical[CLOUD_ONLY])
    return lines


def _passage_lines(options: RunOptions, grounding: Grounding | None) -> list[str]:
    if grounding is None:
        return []
    num = len(grounding.passages)
    if not num:
        return ["no passage of the documents fits the prompt"]
    lines = [f"{num} passage{'s' if num > 1 else ''} of the documents in the prompt, {grounding.num_tokens} tokens"]
    if options.verbose:
        lines += [
            f"[{number}] {passage.where}, characters {passage.start}-{passage.end}"
            for number, passage in enumerate(grounding.passages, 1)
        ]
    return lines


def _document(options: RunOptions, ran: Ran, draft: OpenDraft | None, tokenizer: Tokenizer) -> dict[str, object]:
    result = ran.result
    document = result_as_json(result, tokenizer.decode(result.tokens)) | {"seed": options.params.seed}
    document |= {"draft": draft.placement.as_json() if draft is not None else None, "undrafted": ran.undrafted}
    if (found := ran.comparison) is not None:
        baseline = found.typical[CLOUD_ONLY]
        document |= {
            "cloud_only": result_as_json(baseline, tokenizer.decode(baseline.tokens)),
            "speed_up": found.ratio,
            "speed_ups": list(found.ratios),
            "speed_up_unknown": found.why_not,
            "machine_load": found.load,
            "identical": found.is_same and baseline.tokens == ran.shown.tokens,
        }
    return document
