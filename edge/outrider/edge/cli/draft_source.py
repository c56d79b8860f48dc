"""Finds what a text is drafted from: the drafts to use and where they run, the reference pair, documents.

Drafts are the named ones, else those pulled for the verifier's target, else the reference draft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from outrider.edge.cli.option_groups import DraftingOptions, SourceOptions
from outrider.edge.cli.placing import measured_link, placed_words, rank
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.devices.placement import DraftChoice, Placement
from outrider.edge.devices.profiles import Link
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.link.fleet import open_fleet
from outrider.edge.modes.assemble import OpenDraft, eased, make_depth, make_options, open_draft_bundle
from outrider.edge.modes.draft_ladder import Candidate, candidates_of, lazy_model, open_ladder
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.retrieval.documents import read_documents
from outrider.edge.retrieval.grounding import Library
from outrider.edge.retrieval.index import PassageIndex, default_index_cache
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.fitting import facts_of
from outrider.edge.store.shelf import Pulled, Shelf, find_all_pulled, find_pulled_from, in_use
from outrider.edge.store.tokenizers import last_tokenizer, named_tokenizer, target_tokenizer
from outrider.models.bundle import reference_export
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.bundle.reference_export import AUTO, EXPORTER_PACKAGES, REFERENCE, WIDENED_MB, ReferencePair
from outrider.models.cache_folder import expanded
from outrider.models.client.address import split_login, verifier_url
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError, CloudError, RuntimeUnavailable, TokenizerMismatch
from outrider.models.process.command_line import print_line
from outrider.models.process.extras import is_installed
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.visible import visible
from outrider.models.wire.protocol import ModelFacts


@dataclass(slots=True)
class Notes:
    """Prints what the user should know, on lines of its own. about: where to. printer: of the text that is being shown.

    served: what the clouds said that they serve, once they were asked. is_unanswered: whether none answered.

    A command asks its clouds several times before the first token: which draft fits, what is served, then for the text.
    So what is wrong with them is said once.
    """

    about: Console
    printer: TokenPrinter | None = None
    served: list[ModelFacts | None] = field(default_factory=list)
    is_unanswered: bool = False
    _said: set[str] = field(default_factory=set)

    def line(self, words: str) -> None:
        """Prints a sentence."""
        if self.printer is not None:
            self.printer.break_line()
        print_line(self.about, words, "yellow")

    def before_text(self, words: str) -> None:
        """Prints a sentence about clouds while the text is prepared, unless it has been printed."""
        if words not in self._said:
            self._said.add(words)
            self.line(words)

    def in_text(self, words: str) -> None:
        """Prints one that comes with the text, unless it was printed before: it may come back with another outage."""
        if words not in self._said:
            self.line(words)
        self._said.discard(words)


NPU_SHAPES: Final = StaticShapes(prompt_len=128, response_len=576)
"""Lengths of a reference draft for an NPU: prompts of up to 128 tokens and texts of up to 576."""


def export_reference_pair(choice: DraftChoice, widen_mb: float = WIDENED_MB) -> ReferencePair:
    """The pair that `choice` drafts with; as `reference_export.export_reference_pair`."""
    return reference_export.export_reference_pair(widen_mb, *draft_kind(choice))


def draft_kind(choice: DraftChoice) -> tuple[str, str | None, StaticShapes | None]:
    """Device, runtime and shapes to export the draft for; None takes the device's default."""
    device, runtime = choice.wanted_device or "cpu", choice.wanted_runtime
    return device, None if runtime == "ngram" else runtime, NPU_SHAPES if device == "npu" else None


def default_draft(choice: DraftChoice, widen_mb: float = WIDENED_MB) -> Path:
    """The reference draft's bundle; widen_mb: of the target beside it. Raises RuntimeUnavailable where it cannot be
    exported.
    """
    if missing := next((name for name in EXPORTER_PACKAGES if not is_installed(name)), None):
        raise RuntimeUnavailable(
            f"the reference draft cannot be exported here: the package {missing!r} is not installed. Get a draft "
            "from your server with `outrider pull`"
        )
    return export_reference_pair(choice, widen_mb).draft


MAX_LOADING_S: Final = 2.0
"""How long to wait for a verifier on this machine where none is needed yet."""
CONNECT_S: Final = 1.0
MAX_LOOK_S: Final = 2.5
"""The same for one elsewhere that does not answer: for a connection, and in all."""
Clouds = Sequence[tuple[str, ClientOptions]]
"""Addresses, each with its own key."""


def clouds_of(urls: Sequence[str], keys: Keys, *, is_steady: bool = False) -> Clouds:
    """The addresses with their keys, each without the password that it may have: that goes into its options.

    is_steady: as in ClientOptions.

    Raises ConfigError for an address or a key file that cannot be used.
    """
    clouds = []
    for text in urls:
        url, login = split_login(verifier_url(text))
        key = keys.for_url(text, urls)
        own = ClientOptions(api_key=key, certificate=keys.certificate, login=login, is_steady=is_steady)
        clouds.append((url, own))
    return clouds


def asked_for(clouds: Clouds, model: str | None) -> Clouds:
    """The same clouds, for texts of this model. An adapter's drafts and tokenizer are the target's: ask without it."""
    return [(url, replace(each, model=model)) for url, each in clouds]


def find_drafts(
    drafts: Sequence[str],
    choice: DraftChoice,
    clouds: Clouds,
    notes: Notes,
    *,
    needs_server: bool = True,
) -> list[Bundle]:
    """The drafts, at least one. Raises as `served_facts`, `default_draft` and `open_draft_bundle` do.

    drafts: the option's values. needs_server: where no server answers, False takes what was last pulled from one.
    """
    found: list[Bundle] = []
    for draft in dict.fromkeys(drafts):
        if draft in (AUTO, REFERENCE):
            pulled = _pulled(choice, clouds, notes, needs_server=needs_server) if draft == AUTO else []
            found += pulled or [open_draft_bundle(default_draft(choice))]
        else:
            place = expanded(draft)
            _use_until_the_end(place)
            found.append(open_draft_bundle(place))
    return found


def _pulled(choice: DraftChoice, clouds: Clouds, notes: Notes, *, needs_server: bool) -> list[Bundle]:
    found = _find_pulled(choice, clouds, notes, needs_server=needs_server)
    for each in found:
        print_line(notes.about, f"draft: {each.words}", "dim")
    return [_checked(each.bundle.path) for each in found]


def _find_pulled(choice: DraftChoice, clouds: Clouds, notes: Notes, *, needs_server: bool) -> list[Pulled]:
    if next(Shelf().drafts(), None) is None:
        return []  # asks no server
    served = served_facts(clouds, notes, needs_server=needs_server)
    if served is not None:
        return find_all_pulled(served.tokenizer, served.target, choice)
    last = find_pulled_from([url for url, _ in clouds], choice) if notes.is_unanswered else None
    return [last] if last is not None else []


def served_facts(clouds: Clouds, notes: Notes, *, needs_server: bool) -> ModelFacts | None:
    """What is served there; a command asks once. None where no server says, or where none answers and none is needed.

    Raises CloudError where one is needed, RequestError where one wants another key.
    """
    if not notes.served:
        notes.served.append(asyncio.run(_ask_facts(clouds, notes, needs_server=needs_server)))
    return notes.served[0]


async def _ask_facts(clouds: Clouds, notes: Notes, *, needs_server: bool) -> ModelFacts | None:
    if needs_server:
        async with open_fleet(clouds) as fleet:
            return await facts_of(fleet.clients, note=notes.before_text)
    retry = RetryPolicy(max_failures=max(2, len(clouds)), max_loading_s=MAX_LOADING_S, max_asked_s=0.0)
    try:
        hasty = [(url, replace(each, connect_timeout_s=CONNECT_S)) for url, each in clouds]
        async with open_fleet(hasty) as fleet, asyncio.timeout(MAX_LOOK_S):
            # What is tried meanwhile is of no use; the end of it is said.
            return await facts_of(fleet.clients, retry)
    except TimeoutError:
        urls = " or ".join(url for url, _ in clouds)
        notes.before_text(f"No verifier answers at {urls} within {MAX_LOOK_S:g} s.")
    except CloudError as error:
        notes.before_text(f"{error}.")
    notes.is_unanswered = True
    return None


def other_tokenizer(
    bundles: Sequence[Bundle],
    options: SourceOptions,
    clouds: Clouds,
    notes: Notes,
    *,
    needs_server: bool = True,
    is_drafted: bool = True,
) -> Tokenizer | None:
    """The target's tokenizer, where one of these drafts has another: its tokens are mapped. None where all have it, or
    it is not known.

    needs_server: as in `find_drafts`. Where no server answers, --tokenizer counts, or what was pulled with the draft.
    is_drafted: whether a model drafts, so that there is something to say. Raises TokenizerMismatch with
    --same-tokenizer, else as `target_tokenizer` and `named_tokenizer`.
    """
    served = served_facts(clouds, notes, needs_server=needs_server)
    name, fingerprint = ("the target", None) if served is None else (visible(served.name[:100]), served.tokenizer)
    named: Tokenizer | None = None
    if options.tokenizer is not None:
        named = named_tokenizer(expanded(options.tokenizer), fingerprint, name)
        fingerprint = named.fingerprint
    elif served is None:
        fingerprint = next((known for each in bundles if (known := _pulled_for(each, clouds)) is not None), None)
    others = [each.manifest for each in bundles if each.manifest.tokenizer_fingerprint != fingerprint]
    if fingerprint is None or not others:
        return None
    if options.same_tokenizer and is_drafted:
        raise TokenizerMismatch(
            f"the draft's tokenizer is {others[0].tokenizer_fingerprint[:12]}, that of {name} is {fingerprint[:12]}; "
            "use a draft made for this target, or leave out --same-tokenizer: then its tokens are mapped"
        )
    found = named
    if found is None and served is not None:
        found = asyncio.run(target_tokenizer(clouds, fingerprint))
    elif found is None and (found := last_tokenizer(fingerprint)) is None:
        notes.before_text(
            "The draft was pulled for a target with another tokenizer, which is not here: it cannot draft before a "
            "verifier answers at the start, or --tokenizer names a directory with it."
        )
    if found is not None and is_drafted:
        names = " and ".join(dict.fromkeys(each.name for each in others))
        print_line(notes.about, f"draft: {names} has another tokenizer than {name}: its tokens are mapped", "dim")
    return found


def _pulled_for(bundle: Bundle, clouds: Clouds) -> str | None:
    """The tokenizer of the target that a pulled draft was pulled for last, from one of these clouds if it was."""
    pulled = next((each for each in Shelf().drafts() if each.bundle.path == bundle.path), None)
    if pulled is None:
        return None
    servers = {split_login(verifier_url(url))[0] for url, _ in clouds}
    latest = max(pulled.record.targets.values(), key=lambda each: (each.server in servers, each.at_s), default=None)
    return latest.tokenizer if latest is not None else None


def place_drafts(
    bundles: Sequence[Bundle],
    choice: DraftChoice,
    num_threads: int,
    clouds: Clouds,
    about: Console,
    link: Callable[[], Link] | None = None,
    *,
    is_mapped: bool = False,
) -> list[Candidate]:
    """Where these drafts may run, the best first. Profiles them where there is a choice. is_mapped, and raises: as
    `candidates_of`.

    link: the link to the cloud, by default `measured_link`; called where there is a choice.
    """
    candidates, others = candidates_of(bundles, choice, is_mapped=is_mapped), list[Candidate]()
    if choice.wanted_device is not None or choice.provider:
        # The named device comes first; others only follow where it fails.
        others = [each for each in candidates if each.choice != choice]
        candidates = [each for each in candidates if each.choice == choice]
    if len(candidates) > 1 and candidates[0].placement.runtime != "ngram":
        with about.status("comparing the drafts on this machine", refresh_per_second=1):
            ranked = rank(candidates, num_threads, link() if link is not None else measured_link(clouds))
        print_line(about, f"placed: {placed_words(ranked)}", "dim")
        candidates = [each.candidate for each in ranked]
    return [*candidates, *others]


def open_draft(
    candidates: Sequence[Candidate],
    options: DraftingOptions,
    notes: Notes,
    on_step: Callable[[str], None],
    num_threads: int,
    max_positions: int = 0,
    target: Tokenizer | None = None,
) -> OpenDraft:
    """What drafts one text at a time; the caller closes it. on_step, and raises: as `open_ladder`.

    max_positions: tokens of a text that a model holds; 0: its own. target: as in `open_draft_model`.
    """
    models = [lazy_model(each, num_threads, max_positions=max_positions, target=target) for each in candidates]
    is_asked = options.choice.wanted_device is not None
    draft = open_ladder(models, on_step, is_asked=is_asked, is_looked_up=options.is_looked_up)
    show_notes(draft.placement, notes)
    return draft


def agent_options(options: DraftingOptions, eased_by: str | None = None) -> AgentOptions:
    """What these options say of a drafted tree. eased_by: why it is half of that. Raises ConfigError."""
    make_depth(options.depth, Estimates())  # a wrong one is found before a model is loaded
    tree = make_options(options.width, options.effort, is_looked_up=options.is_looked_up)
    return tree if eased_by is None else eased(tree)


def show_notes(placement: Placement, notes: Notes) -> None:
    """What the user should know of the place that was taken."""
    for note in placement.notes:
        notes.line(f"note: {note}")


def _use_until_the_end(place: Path) -> None:
    """Marks a bundle as in use until the command that runs now ends; outside of a command, does nothing."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.with_resource(in_use(place))


def _checked(pulled: Path) -> Bundle:
    """A pulled draft that is whole. Raises BundleError with the command that mends it."""
    _use_until_the_end(pulled)
    try:
        return open_draft_bundle(pulled)
    except BundleError as error:
        damage = str(error).rpartition("; ")[0]  # without the advice for bundles that were copied
        raise BundleError(f"the pulled draft is damaged: {damage}; run `outrider pull` again") from None


def open_library(docs: Path, tokenizer: Tokenizer, about: Console) -> Library:
    """Reads and indexes the documents; says what is left out. Raises ConfigError, and RuntimeUnavailable."""
    found = read_documents(docs)
    index = PassageIndex(found.documents, default_index_cache())
    for sentence in found.left_out:
        print_line(about, f"documents {sentence}", "yellow")
    print_line(
        about,
        f"documents: {len(found.documents)}, in {len(index.passages)} passages; the index was "
        f"{'read from the cache' if index.was_cached else 'made'}",
        "dim",
    )
    return Library(index, tokenizer)
