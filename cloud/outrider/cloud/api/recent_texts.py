"""Gives requests the earlier text after their prompt, and keeps the text that they get: within one owner and salt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.cloud.recent.store import PromptDigest, RecentStore, RecentText, sampling_digest
from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest, Sink
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.by_owner import Bounds, OwnerStore
from outrider.models.processors.options import PLAIN

_LEAST_TOKENS: Final = 4
"""Of a text that is worth keeping."""
_PREFIXES: Final = Bounds(max_each=256, max_all=4096)
"""Kept prefixes whose digest is known; without it, a request that continues one is not drafted so."""


@dataclass(slots=True)
class Recalled:
    """A request with what is known of its prompt. digest: None where the prompt's beginning is not known."""

    request: GenerateRequest
    _memory: RecentTexts | None = None
    _digest: PromptDigest | None = None
    _tokens: list[int] = field(default_factory=list)

    def sink(self, sink: Sink) -> Sink:
        """A sink that also keeps the text at its end."""
        if self._digest is None:
            return sink

        def taking(event: Event) -> None:
            if isinstance(event, CommitEvent):
                self._tokens.extend(event.tokens)
            elif isinstance(event, EndEvent):
                self._end(event)
            sink(event)

        return taking

    def predicted(self, prediction: Sequence[int]) -> Recalled:
        """The same with the client's own guess of the text, unless the text is known already."""
        hints = self.request.hints
        if not prediction or hints.is_repeat:
            return self
        hints = replace(hints, recent=tuple(prediction), is_predicted=True)
        return replace(self, request=replace(self.request, hints=hints))

    def for_choice(self, params: SamplingParams) -> Recalled:
        """For another text of the same prompt: drafted alike, and not kept."""
        request = self.request
        pick, hints = replace(request.pick, params=params), replace(request.hints, is_repeat=False)
        return Recalled(replace(request, pick=pick, hints=hints))

    def _end(self, event: EndEvent) -> None:
        """On the engine's thread."""
        assert self._memory is not None and self._digest is not None
        if event.reason == "error":
            return
        tokens, request = tuple(self._tokens), self.request
        if event.prefix_hash is not None:
            self._memory.note_prefix(request, event.prefix_hash, self._digest.with_tokens(tokens))
        if request.hints.is_repeat and request.hints.recent[: len(tokens)] == tokens:
            tokens = request.hints.recent  # all that is known of it
        if len(tokens) >= _LEAST_TOKENS:
            self._memory.store.put(self._digest.place, RecentText(tokens, _sampling_of(request)))


class RecentTexts:
    """The store of recent texts as routes use it. target: identity of what picks the tokens."""

    def __init__(self, store: RecentStore, target: str) -> None:
        self.store = store
        self._target = target
        self._prefixes = OwnerStore[bytes, str, PromptDigest](_PREFIXES)
        self._lock = threading.Lock()

    async def recall(self, request: GenerateRequest) -> Recalled:
        """The request, with the earlier text after its prompt if there is one."""
        digest = self._digest_of(request)
        if digest is None:
            return Recalled(request)
        digest = digest.with_tokens(request.prompt)
        found = await self.store.find(digest.place)
        if found is not None:
            is_repeat = found.sampling == _sampling_of(request)
            hints = replace(request.hints, recent=found.tokens, is_repeat=is_repeat)
            request = replace(request, hints=hints)
        return Recalled(request, self, digest)

    def _digest_of(self, request: GenerateRequest) -> PromptDigest | None:
        """The digest of what comes before the prompt."""
        if request.prefix_hash is None:
            return PromptDigest(self._target, request.asker.owner, request.asker.salt)
        with self._lock:
            return self._prefixes.get(request.asker.owner, request.asker.name_of(request.prefix_hash))

    def note_prefix(self, request: GenerateRequest, prefix_hash: str, digest: PromptDigest) -> None:
        """Remembers the digest of a text whose blocks are kept. Any thread."""
        with self._lock:
            self._prefixes.put(request.asker.owner, request.asker.name_of(prefix_hash), digest)


def _sampling_of(request: GenerateRequest) -> bytes:
    """Digest of all that decides the text, besides the prompt and what ends it."""
    if request.pick.processors == PLAIN and request.pick.grammar is None:
        return sampling_digest(request.pick.params)
    # Penalties depend on where the text begins, a minimum of tokens on what would end it.
    stops = sorted(request.stop_ids) if request.pick.processors.min_tokens else ()
    grammar = request.pick.grammar.spec.hash if request.pick.grammar is not None else ""
    return sampling_digest(request.pick.params, request.pick.processors, request.num_generated, stops, grammar)
