"""Asks the verifiers for what the local endpoint needs beside texts: who they are, and conversations as token ids.

The connections are shared; what is measured and counted belongs to one text each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from outrider.edge.link.delayed import DelayedClient
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.fleet import Fleet
from outrider.edge.link.origin import Served, TextOrigin
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointUnfit
from outrider.models.errors import CloudError, OutriderError, TokenizerMismatch
from outrider.models.http.openai import Conversation
from outrider.models.visible import visible
from outrider.models.wire.protocol import ModelFacts, ReadyAnswer, RenderAnswer

_log = logging.getLogger("outrider.serve")

Answer = TypeVar("Answer")

FACTS_S: Final = 30.0
"""How long facts are believed after an answer or a text of the same target: another one shows after that time."""
MOST_FACTS_S: Final = 300.0
"""How long they are believed after the answer, whatever texts say: a session names the target, and not all facts."""
PATIENT_S: Final = 1.0
"""How long a verifier that is slow to say its facts again is waited for; then the known ones serve. A text is safe with
old ones: it is refused where another target answers."""
MOMENT_S: Final = 0.5
"""How long a text that the draft may write alone waits for verifiers of which none has answered within FACTS_S."""
READY_S: Final = 1.0
"""The same for readiness: probes may come often."""
CUT_S: Final = 0.3
"""How long it asks again verifiers that cut its connections."""
ASKED_S: Final = 3.0
"""How long a text waits for verifiers that ask for time; then its client gets 503, and can do so itself."""


class Upstream:
    """The verifiers of one target. fingerprint: of the device's tokenizer. Belongs to one event loop."""

    def __init__(
        self,
        clients: Sequence[VerifierClient],
        fingerprint: str,
        retry: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = list(clients)
        self._fingerprint = fingerprint
        self._retry = retry or RetryPolicy(max_loading_s=2.0, max_asked_s=ASKED_S)
        self.clock = clock
        self._facts: tuple[float, ModelFacts] | None = None
        self._facts_url = ""
        self._confirmed_at = 0.0
        self._lost_at = -math.inf  # when no verifier has answered, if none has since
        self._ready: tuple[float, ReadyAnswer] | None = None
        # One question of a kind at a time, however many clients wait for its answer.
        self._asked: dict[Callable[[], Awaitable[Any]], asyncio.Task[Any]] = {}
        self.fleet = Fleet(self._clients, on_change=_note)

    async def aclose(self) -> None:
        """Closes every connection."""
        await self.fleet.aclose()
        for question in self._asked.values():
            question.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    def endpoints(self, delay_s: float = 0.0, *, no_store: bool = False, model: str | None = None) -> Endpoints:
        """The endpoints for one text, in the order in which it tries them. delay_s: added to their round trips.

        no_store, model: as in ClientOptions.
        """
        clients = [
            DelayedClient(client, delay_s, no_store=no_store, model=model)
            if delay_s
            else client.for_one_text(no_store=no_store, model=model)
            for client in self.fleet.ranked()
        ]
        return Endpoints(clients, self._retry, on_trouble=_note, fleet=self.fleet)

    def confirm(self, facts: ModelFacts) -> None:
        """Records that the target of these facts has written a text just now, so they hold."""
        known = self._facts
        if facts.target is not None and known is not None and known[1].named(facts.name) == facts:
            self._confirmed_at = self.clock()  # else a text would wait for a round trip every 30 s

    async def facts(self, *, is_fresh: bool = False, is_brief: bool = False) -> ModelFacts:
        """The target's facts. is_fresh: asks again. Raises CloudError, and TokenizerMismatch for another tokenizer.

        is_brief: while no verifier answers, one call waits for that; others raise CloudError after a moment.
        """
        known = self._facts
        if not is_fresh and known is not None and self._holds(known[0]):
            return known[1]
        question = self._begin(self._ask_facts)
        if not is_fresh and known is not None:
            await asyncio.wait({question}, timeout=PATIENT_S)
            if not question.done():
                return known[1]
        elif is_brief and self.clock() - self._lost_at < FACTS_S:
            await asyncio.wait({question}, timeout=MOMENT_S)
            if not question.done():
                raise CloudError("No verifier has answered for some time; they are being asked again")
        return await asyncio.shield(question)

    def _holds(self, asked_at: float) -> bool:
        now = self.clock()
        return now - max(asked_at, self._confirmed_at) < FACTS_S and now - asked_at < MOST_FACTS_S

    async def _ask_facts(self) -> ModelFacts:
        now = self.clock()
        try:
            url, facts = await self._ask(_facts_of)
        except CloudError:
            self._lost_at = self.clock()  # facts that are known serve on
            raise
        self._lost_at = -math.inf
        if facts.tokenizer != self._fingerprint:
            raise TokenizerMismatch(
                f"this endpoint's tokenizer is {self._fingerprint[:12]}, that of {facts.name[:100]} is "
                f"{facts.tokenizer[:12]}. Use a draft made for this target, or start this endpoint again, now that the "
                "verifier answers: then its tokens are mapped"
            )
        self._facts, self._facts_url = (now, facts), url
        return facts

    def forget_facts(self) -> None:
        """Asks again at the next request: another target may answer."""
        self._facts = None

    def lost(self, began: float) -> None:
        """Records that no verifier has answered a text that began then, by `clock`; unless one has answered since."""
        known = self._facts
        if known is None or max(known[0], self._confirmed_at) < began:
            self._facts, self._lost_at = None, self.clock()

    def origin(self, facts: ModelFacts) -> TextOrigin:
        """For a text that this target must write: the answer names it, and its template made the prompt."""
        text = TextOrigin()
        text.took_tokens(Served(self._facts_url, facts.name, facts.target, has_mid=facts.mid is not None))
        return text

    async def render(self, conversation: bytes, facts: ModelFacts) -> RenderAnswer:
        """A conversation's token ids, by the chat template of the target of these facts.

        Raises TargetMismatch where another one answers, and else as a verifier's client does.
        """

        async def ask(client: VerifierClient) -> RenderAnswer:
            rendered = await client.for_one_text(model=facts.adapter).render(conversation)
            self.origin(facts).require_same(Served(client.url, rendered.model, rendered.target))
            return rendered

        return await self._ask(ask)

    async def ready(self) -> ReadyAnswer:
        """The readiness of the first verifier that answers. Raises CloudError."""
        if self._ready is not None and self.clock() - self._ready[0] < READY_S:
            return self._ready[1]
        return await asyncio.shield(self._begin(self._ask_ready))

    async def _ask_ready(self) -> ReadyAnswer:
        now = self.clock()

        async def ask(client: VerifierClient) -> ReadyAnswer:
            if self.fleet.refuses(client.url):
                raise EndpointUnfit(f"{client.url} refuses this device's key")
            asked_at = self.clock()
            ready = await client.ready()
            self.fleet.answered(client.url, ready, 1e3 * (self.clock() - asked_at))
            return ready

        ready = await self._ask(ask)
        self._ready = (now, ready)
        return ready

    def _begin(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> asyncio.Task[Answer]:
        """The question that is being asked, or a new one. It goes on where a client that waits for it leaves."""
        if (question := self._asked.get(ask)) is None:
            question = self._asked[ask] = asyncio.get_running_loop().create_task(ask())

            def end(done: asyncio.Task[Any]) -> None:
                self._asked.pop(ask, None)
                if not done.cancelled():
                    done.exception()  # who waits for it gets it; perhaps nobody does

            question.add_done_callback(end)
        return question

    async def _ask(self, ask: Callable[[VerifierClient], Awaitable[Answer]]) -> Answer:
        clients = [client.for_one_text() for client in self.fleet.ranked()]
        return await Endpoints(clients, quick(len(clients)), fleet=self.fleet).call(ask)


def quick(num_clouds: int) -> RetryPolicy:
    """For what a client waits for before its text begins: each verifier is asked once, an only one twice; oftener where
    they cut the connections at once.
    """
    return RetryPolicy(
        max_failures=max(2, num_clouds), max_outage_s=0.0, max_loading_s=0.0, max_cut_s=CUT_S, max_asked_s=0.0
    )


def conversation_to_render(conversation: Conversation, fingerprint: str) -> bytes:
    """The body of /v1/render. Blocking: half a megabyte takes tens of milliseconds."""
    document: dict[str, Any] = {
        "messages": [message.model_dump(exclude_unset=True) for message in conversation.messages],
        "tokenizer": fingerprint,
        "chat_template_kwargs": conversation.chat_template_kwargs,
    }
    more = {"tools": conversation.tools_for_template(), "truncate_prompt_tokens": conversation.truncate_prompt_tokens}
    # Older servers ignore what they do not know.
    document |= {name: value for name, value in more.items() if value is not None}
    # As UTF-8: escaped, most scripts take two or three times the bytes, and the server bounds them.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def _facts_of(client: VerifierClient) -> tuple[str, ModelFacts]:
    return client.url, await client.model_facts()


async def look_at(upstream: Upstream, model: str | None) -> None:
    """Logs, at the start, whether the verifiers answer, fit the draft and serve `model`. Raises TokenizerMismatch."""
    if (mixed := await upstream.fleet.mixed_targets()) is not None:
        _note(mixed)
    try:
        facts = await upstream.facts()
    except TokenizerMismatch:
        raise
    except CloudError:  # the command has said which, and each request says why
        _note("no verifier yet; requests get 503, still trying")
    except OutriderError as error:
        _note(f"{error}. Requests get 503 until one answers.")
    else:
        _log.info("the target is %s, with %d positions", visible(facts.name), facts.max_positions)
        if model and facts.named(model) is None:
            _note(f"--model is {model}, and {facts.name} has no such model: requests that name none get 404")


def _note(words: str) -> None:
    _log.warning("%s", visible(words))
