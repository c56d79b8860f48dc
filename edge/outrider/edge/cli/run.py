"""Runs one generation from the terminal.

The text goes to standard output, statistics and messages to standard error.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from rich.console import Console

from outrider.edge.cli.draft_source import (
    Clouds,
    Notes,
    agent_options,
    asked_for,
    find_drafts,
    open_draft,
    open_library,
    other_tokenizer,
    place_drafts,
)
from outrider.edge.cli.run_options import RunOptions, compiled_for_draft
from outrider.edge.cli.summary import draft_lines, result_as_json, summary_lines, why_undrafted
from outrider.edge.cli.terminal import TokenPrinter, print_document
from outrider.edge.cli.verifiers import Verifiers, open_verifiers
from outrider.edge.devices.power import PowerWatch
from outrider.edge.lab.comparison import DRAFTED, Comparison, compare_modes
from outrider.edge.lab.laboratory import CLOUD_ONLY
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.fleet import COMPARE_TIMEOUT_S, Fleet, open_fleet
from outrider.edge.modes.assemble import Agent, OpenDraft, make_agent
from outrider.edge.modes.draft_ladder import Candidate
from outrider.edge.modes.offline import OfflineText, OfflineWriter, whole_result
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, TokenBatch
from outrider.edge.retrieval.grounding import Grounding
from outrider.models.bundle.reference_export import AUTO, REFERENCE
from outrider.models.client.tracing import start_tracing
from outrider.models.counted import counted
from outrider.models.errors import ConfigError
from outrider.models.grammar.reasoning import after_reasoning, marks_reasoning
from outrider.models.process.command_line import print_line
from outrider.models.text.detokenizer import StreamingDetokenizer
from outrider.models.text.tokenizer import Tokenizer

ROUNDS: Final = 3
"""Of --compare; the median counts."""
OFFLINE_RETRY: Final = RetryPolicy(max_failures=2, max_outage_s=3.0, max_loading_s=1.0, max_asked_s=3.0)
"""With --offline-ok a cloud is given up soon: text comes in the meantime, and the cloud is looked for."""


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
    offline: OfflineText | None = None


def run_once(options: RunOptions, out: Console, about: Console) -> None:
    """Generates a text, shows it and its statistics; raises OutriderError. out: the text. about: everything else."""
    agent_options(options)  # a wrong option is found before a model is loaded
    if not {AUTO, REFERENCE}.isdisjoint([*options.draft, options.target]) and not options.prompt:
        raise ConfigError("the prompt is empty; expected a text to continue")  # before an export of minutes
    with open_verifiers(options, about) as verifiers:
        _run_once(options, verifiers, out, about)


def _run_once(options: RunOptions, verifiers: Verifiers, out: Console, about: Console) -> None:
    clouds = verifiers.clouds
    is_drafted = options.mode is not Mode.CLOUD_ONLY
    notes = Notes(about)
    needs_server = not options.may_write_alone
    bundles = find_drafts(verifiers.drafts, options.choice, clouds, notes, needs_server=needs_server)
    has_model = is_drafted and options.choice.runtime != "ngram"
    target = other_tokenizer(bundles, options, clouds, notes, needs_server=needs_server, is_drafted=has_model)
    candidates: list[Candidate] = []
    if is_drafted:
        is_mapped = target is not None
        candidates = place_drafts(bundles, options.choice, options.threads, clouds, about, is_mapped=is_mapped)
    tokenizer = target or (candidates[0].bundle if candidates else bundles[0]).tokenizer()
    grounding = None
    if options.docs is not None and options.prompt is not None:
        grounding = open_library(options.docs, tokenizer, about).ground(options.prompt)
    request = make_request(options, tokenizer, grounding)
    steps: list[str] = []
    draft = None
    if candidates:
        draft = open_draft(candidates, options, notes, steps.append, options.threads, target=target)
    shown = Console(file=io.StringIO()) if options.as_json else out
    notes.printer = printer = _printer(shown, options, tokenizer.detokenizer(context=request.prompt))
    eased_by = PowerWatch(options.on_battery).reason if is_drafted else None
    with closing(draft.drafter) if draft is not None else nullcontext():
        end_tracing = start_tracing(lambda words: print_line(about, words, "yellow"))
        try:
            ran = verifiers.run(_generate(options, clouds, request, tokenizer, draft, grounding, eased_by, notes))
        finally:
            end_tracing()
            printer.break_line()  # an error or Ctrl-C may have interrupted the text
    if options.as_json:
        document = _document(options, ran, draft, tokenizer) | {"eased_by": eased_by, "draft_steps": steps}
        if grounding is not None:
            document |= {"passages": grounding.as_json(), "passage_tokens": grounding.num_tokens}
        print_document(out, document)
        return
    for line in [*_lines(len(request.prompt), ran, draft, options.verbose), *_passage_lines(options, grounding)]:
        print_line(about, line, "dim")
    if eased_by is not None:
        notes.line(f"drafted with half the work: {eased_by} (--on-battery full drafts all)")
    for line in steps:
        notes.line(line)
    if ran.offline is not None and ran.offline.num_local:
        print_line(about, offline_line(ran.offline), "bold yellow" if ran.offline.local else "yellow")
    if ran.undrafted is not None:
        notes.line(ran.undrafted)
    if ran.comparison is not None:
        print_line(about, ran.comparison.sentence(options.mode.value), "bold")
        if ran.comparison.load is not None:
            notes.line(ran.comparison.load)
    print_line(about, f"seed {options.params.seed}", "dim")


def _printer(out: Console, options: RunOptions, detokenizer: StreamingDetokenizer) -> TokenPrinter:
    """Shows the prompt too on a terminal; a file or a pipe gets the generated text only."""
    prompt = options.prompt if out.is_terminal and options.prompt else ""
    return TokenPrinter(out, detokenizer, f"{prompt}\n" if prompt and options.chat else prompt)


def make_request(options: RunOptions, tokenizer: Tokenizer, grounding: Grounding | None = None) -> GenerationRequest:
    """The request for the prompt. stop_ids stay unset: the target's end tokens count, not the draft's."""
    assert options.prompt is not None
    text = options.prompt if grounding is None else grounding.before + options.prompt
    if options.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=not options.chat)
    grammar = options.grammar
    if grammar is not None and options.chat and marks_reasoning(tokenizer):
        grammar = after_reasoning(grammar, tokenizer, prompt)  # it is of what follows the reasoning
    return GenerationRequest(
        prompt=tuple(prompt),
        params=options.params,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        tokenizer=tokenizer.fingerprint,
        processors=options.with_bad_words(partial(tokenizer.encode, add_special_tokens=False)),
        end_ids=frozenset(tokenizer.eos_token_ids),
        grammar=grammar,
        draft_grammar=None if options.mode is Mode.CLOUD_ONLY else compiled_for_draft(grammar, tokenizer),
    )


async def _generate(
    options: RunOptions,
    clouds: Clouds,
    request: GenerationRequest,
    tokenizer: Tokenizer,
    draft: OpenDraft | None,
    grounding: Grounding | None,
    eased_by: str | None,
    notes: Notes,
) -> Ran:
    """The text, and what --compare measures. notes: its printer shows the text."""
    assert notes.printer is not None
    if options.no_recent or options.compare:  # or the second of two equal texts would be drafted from the first
        clouds = [(url, replace(each, no_store=True)) for url, each in clouds]
    async with open_fleet(asked_for(clouds, options.model)) as fleet:
        if (mixed := await fleet.mixed_targets()) is not None:
            notes.in_text(mixed)
        endpoints = Endpoints(
            fleet.ranked(), OFFLINE_RETRY if options.may_write_alone else None, on_trouble=notes.in_text, fleet=fleet
        )
        drafter = draft.drafter if draft is not None else None
        agent = make_agent(
            options.mode,
            endpoints,
            drafter,
            options.depth,
            replace(agent_options(options, eased_by), terms=options.terms),
            quoted=grounding.quoted if grounding is not None else (),
        )
        offline: OfflineText | None = None
        if options.may_write_alone and isinstance(agent, StreamAgent) and draft is not None:
            offline = await _generate_offline_ok(agent, draft, request, fleet, tokenizer, notes)
            result = whole_result(offline)
        else:
            result = await agent.generate(request, notes.printer)
        notes.printer.finish()
        urls = [url for url, _ in clouds]
        comparison = await _compare(urls, request, agent, endpoints, notes.about) if options.compare else None
        counted = comparison.typical[DRAFTED] if comparison is not None else result
        longest = draft.placement.max_positions if draft is not None else None
        return Ran(result, counted, why_undrafted(counted, agent, longest, len(request.prompt)), comparison, offline)


async def _generate_offline_ok(
    agent: StreamAgent,
    draft: OpenDraft,
    request: GenerationRequest,
    fleet: Fleet,
    tokenizer: Tokenizer,
    notes: Notes,
) -> OfflineText:
    assert agent.drafter is not None and notes.printer is not None
    printer, is_alone = notes.printer, False

    async def find_cloud() -> bool:
        return await fleet.finds_one(COMPARE_TIMEOUT_S)

    def on_replaced(verified: Sequence[int]) -> None:
        notes.in_text("The target goes on in place of the unverified text:")
        printer.replace_unverified(tokenizer.detokenizer(context=[*request.prompt, *verified]))

    def on_tokens(batch: TokenBatch) -> None:
        nonlocal is_alone
        if batch.is_unverified and not is_alone:
            notes.in_text("No cloud serves the text: the draft goes on alone, unverified.")
        is_alone = batch.is_unverified
        printer(batch)

    writer = OfflineWriter(
        agent,
        agent.drafter,
        frozenset(tokenizer.eos_token_ids),
        find_cloud,
        printer.confirm_unverified,
        on_replaced,
        max_positions=draft.placement.max_positions,
    )
    text = await writer.generate(request, on_tokens)
    printer.confirm_unverified(len(text.local))
    return text


def offline_line(text: OfflineText) -> str:
    """What the draft wrote alone, for people."""
    if text.local:
        return (
            f"UNVERIFIED: the draft wrote the last {len(text.local)} of {len(text.tokens)} tokens alone, since no "
            f"cloud served it: {text.error}"
        )
    return (
        f"verified: of {text.num_local} tokens that the draft wrote alone, the target confirmed {text.num_confirmed} "
        f"and replaced {text.num_replaced}"
    )


async def _compare(
    urls: Sequence[str], request: GenerationRequest, agent: Agent, endpoints: Endpoints, about: Console
) -> Comparison:
    # Drawn seldom, because that takes processor time from what is measured.
    with about.status("comparing with cloud-only", refresh_per_second=1) as status:

        def show(num_done: int) -> None:
            status.update(f"comparing with cloud-only: {num_done} of {ROUNDS} rounds")

        return await compare_modes(agent, make_agent(Mode.CLOUD_ONLY, endpoints, None), request, ROUNDS, urls, show)


def _lines(num_prompt: int, ran: Ran, draft: OpenDraft | None, is_verbose: bool) -> list[str]:
    lines = summary_lines(ran.result, is_verbose)
    if ran.result.num_recent:
        lines.append(
            f"the server drafted from the answer that this prompt got before ({counted(ran.result.num_recent, 'token')}"
            "); switch it off with --no-recent"
        )
    if draft is not None:
        lines += draft_lines(draft.placement, num_prompt, len(ran.result.tokens))
    if ran.comparison is not None:
        lines += summary_lines(ran.comparison.typical[CLOUD_ONLY], is_verbose)
    return lines


def _passage_lines(options: RunOptions, grounding: Grounding | None) -> Iterator[str]:
    if grounding is None:
        return
    if not grounding.passages:
        yield "no passage of the documents fits the prompt"
        return
    yield f"{counted(len(grounding.passages), 'passage')} of the documents in the prompt, {grounding.num_tokens} tokens"
    if options.verbose:
        for number, passage in enumerate(grounding.passages, 1):
            yield f"[{number}] {passage.where}, characters {passage.start}-{passage.end}"


def _document(options: RunOptions, ran: Ran, draft: OpenDraft | None, tokenizer: Tokenizer) -> dict[str, object]:
    result = ran.result
    document = result_as_json(result, tokenizer.decode(result.tokens)) | {"seed": options.params.seed}
    document |= {"draft": draft.placement.as_json() if draft is not None else None, "undrafted": ran.undrafted}
    if ran.offline is not None:
        document["offline"] = ran.offline.as_json()
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
