"""Holds a conversation with a target: its messages, the ids that they became, and what a server holds of them.

The target's server renders the messages as ids (POST /v1/render). The next turn keeps the ids of the turns before and
adds what the template adds, so the draft's cache goes on, and the server gets the new ids and the hash of the others.
Whatever a cache has lost, or the template writes anew, is sent again: that costs time, and changes no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.edge.chat.messages import (
    ASSISTANT,
    MAX_MESSAGES,
    SYSTEM,
    USER,
    Message,
    render_fitting,
)
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.origin import Served, TextOrigin
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, HeldPrefix, OnTokens, TokenBatch
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost, ProtocolBroken
from outrider.models.errors import CloudError, ConfigError, RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import num_shared
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.fields import MAX_COUNT
from outrider.models.wire.protocol import MAX_BODY_BYTES, ModelFacts, RenderAnswer


def continued(tokenizer: Tokenizer, kept: Sequence[int], rendered: Sequence[int]) -> list[int] | None:
    """The ids `kept` and those of `rendered` that follow the same text.

    None where `rendered` begins with another text, or no token begins after it: then its own ids are the prompt.
    """
    shared = num_shared(kept, rendered)
    own, start = kept[shared:], shared
    if own:
        detokenizer = tokenizer.detokenizer(context=kept[:shared], skip_special_tokens=False)
        text, found = detokenizer.push(own) + detokenizer.flush(), ""
        detokenizer = tokenizer.detokenizer(context=kept[:shared], skip_special_tokens=False)
        while len(found) < len(text) and start < len(rendered):
            found += detokenizer.push(rendered[start])
            start += 1
        if found != text:
            return None
    return [*kept, *rendered[start:]] if start < len(rendered) else None


MAX_NAME_CHARS: Final = 100
_CUT: Final = "the answer before was cut short"


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer that has ended. text: as shown. first_token_s: from the question, the rendering included.

    num_prompt: tokens of the prompt; num_sent of them were sent, the others by a hash. sent_again: why the ids of the
    turns before were not kept; None where they were.
    """

    result: GenerationResult
    text: str
    num_prompt: int
    num_sent: int
    first_token_s: float
    sent_again: str | None = None


@dataclass(slots=True)
class Conversation:
    """One conversation. Belongs to one event loop; one answer at a time.

    facts: the target's, as its server reported them. fingerprint: of the device's tokenizer. on_note: called with a
    sentence where something changes that the user must see.
    """

    agent: StreamAgent
    facts: ModelFacts
    tokenizer: Tokenizer
    fingerprint: str
    on_note: Callable[[str], None] = lambda words: None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_dropped: int = 0
    _kept: list[int] = field(default_factory=list)
    _has_stopped: bool = False
    _held: HeldPrefix | None = None
    _unheld: str = _CUT  # why no server holds the ids, where none does
    _changed: str | None = None
    _served: Served | None = None

    @property
    def model(self) -> str:
        """The target's name, as far as it is short."""
        return (self._served.model if self._served is not None else self.facts.name)[:MAX_NAME_CHARS]

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far, as the caches hold it."""
        return len(self._kept)

    def replace(self, messages: list[Message], why: str) -> None:
        """Begins again from these messages; all of them are sent at the next turn. why: for the statistics."""
        self.messages = messages
        self._forget(why if self._kept else None)

    def set_system(self, text: str) -> None:
        """Sets the system message; "" removes it."""
        rest = [message for message in self.messages if message.role != SYSTEM]
        self.replace([Message(role=SYSTEM, content=text), *rest] if text else rest, "the system message was changed")

    async def answer(
        self,
        question: str,
        params: SamplingParams,
        max_tokens: int,
        show: Callable[[Sequence[int]], OnTokens] = lambda prompt: lambda batch: None,
    ) -> Turn:
        """Asks, and returns the answer. Drops the oldest turns where the context is full.

        show: called with the prompt's ids, gives what is called with the answer's tokens as they arrive.
        Where it ends early, by cancellation or an error, what was answered so far stays in the conversation; a question
        without any answer does not. Raises CloudError, RequestError and TokenizerMismatch as `StreamAgent.generate`
        does, ConfigError where the question alone is too long.
        """
        began = time.perf_counter()
        tokens: list[int] = []
        prompt: list[int] = []
        first_token_s = 0.0
        is_asked = False

        def note(batch: TokenBatch) -> None:
            nonlocal first_token_s
            first_token_s = first_token_s or time.perf_counter() - began
            tokens.extend(batch.tokens)
            on_tokens(batch)

        try:
            rendered = await self._render_fitting(question, max_tokens)
            is_asked = True
            prompt, sent_again = self._prompt(rendered)
            on_tokens = show(prompt)
            request = GenerationRequest(
                prompt=tuple(prompt),
                params=params,
                max_tokens=max_tokens,
                tokenizer=self.fingerprint,
                held=self._held,
                keeps_prefix=True,
            )
            origin = TextOrigin()
            assert self._served is not None
            origin.took_tokens(self._served)
            result = await self.agent.generate(request, note, origin)
        except BaseException:
            self._held = None  # the server may have taken it
            if tokens:
                self._end_turn(prompt, tokens)
            elif is_asked:
                self.messages.pop()
            raise
        if sent_again is None and self._kept and result.num_prompt_sent == len(prompt):
            sent_again = self._unheld if self._held is None else "the server held them no longer"
        self._end_turn(prompt, tokens)
        self._held, self._has_stopped = result.held, result.finish_reason == "stop"
        self._unheld = "the server keeps no prefixes" if result.held is None else _CUT
        text, num_sent = self.messages[-1].content, result.num_prompt_sent
        self.turns.append(Turn(result, text, len(prompt), num_sent, first_token_s, sent_again))
        return self.turns[-1]

    def _end_turn(self, prompt: list[int], tokens: list[int]) -> None:
        detokenizer = self.tokenizer.detokenizer(context=prompt)
        self.messages.append(Message(role=ASSISTANT, content=detokenizer.push(tokens) + detokenizer.flush()))
        self._kept, self._has_stopped, self._changed = [*prompt, *tokens], False, None
        self._unheld = _CUT

    def _forget(self, why: str | None) -> None:
        self._kept, self._held, self._has_stopped, self._changed = [], None, False, why

    def _prompt(self, rendered: list[int]) -> tuple[list[int], str | None]:
        """The ids to continue, and why those of the turns before are not among them."""
        if not self._kept:
            return rendered, self._changed
        if (ids := continued(self.tokenizer, self._kept, rendered)) is not None:
            return ids, None
        self._held = None
        # A template may end an answer with another token than the one that ended it.
        if self._has_stopped and (ids := continued(self.tokenizer, self._kept[:-1], rendered)) is not None:
            return ids, "the template ends an answer with another token than the model"
        return rendered, "the template writes the turns before in another way"

    async def _render_fitting(self, question: str, max_tokens: int) -> list[int]:
        """The ids of the conversation with a question; drops turns where they do not fit."""
        limit = self.facts.max_positions

        async def render(messages: list[Message]) -> list[int]:
            return (await self._render(messages)).tokens

        asked = [*self.messages, Message(role=USER, content=question)]
        messages, tokens, num_dropped = await render_fitting(asked, render, limit, max_tokens)
        if len(tokens) >= limit:
            raise ConfigError(
                f"this message has {len(tokens)} tokens with the template's; {self.model} takes at most {limit - 1}; "
                "send a shorter one"
            )
        self.messages = messages
        if num_dropped:
            self._forget("the oldest turns were dropped")
            self.num_dropped += num_dropped
            what = "oldest turn was dropped" if num_dropped == 1 else f"{num_dropped} oldest turns were dropped"
            full = f"context of {limit} tokens" if len(asked) < MAX_MESSAGES else f"chat of {MAX_MESSAGES} messages"
            self.on_note(f"The {full} is full: the {what}. The model no longer sees what is dropped.")
        return tokens

    async def _render(self, messages: list[Message]) -> RenderAnswer:
        document = {"messages": [message.model_dump() for message in messages], "tokenizer": self.fingerprint}
        body = json.dumps(document, ensure_ascii=False).encode()
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                "body_too_large",
                f"the message has {len(body) >> 10} KiB; a server takes {MAX_BODY_BYTES >> 10}; send a shorter one",
            )

        async def ask(client: VerifierClient) -> RenderAnswer:
            rendered, before = await client.render(body), self._served
            served = Served(client.url, rendered.model, rendered.target)
            if before is not None and (before.model, before.target) != (served.model, served.target):
                self.facts = await _facts_of(client)
                self._held = None
                self.on_note(f"The conversation goes on with {served}; it was with {before}.")
            self._served = replace(served, has_mid=self.facts.mid is not None)
            return rendered

        try:
            return await self.agent.endpoints.call(ask)
        except CloudError as error:
            if isinstance(error.__cause__, EndpointLost) and error.__cause__.status == 404:
                raise CloudError("the server renders no conversations (/v1/render): it is older; update it") from error
            raise


async def _facts_of(client: VerifierClient) -> ModelFacts:
    facts = await client.model_facts()
    if not 1 <= facts.max_positions <= MAX_COUNT:
        raise ProtocolBroken(client.url, f"max_positions is out of bounds; expected 1 to {MAX_COUNT}")
    return facts


async def read_facts(endpoints: Endpoints) -> ModelFacts:
    """The target's facts. Raises CloudError, and ConfigError for a target that cannot chat."""
    facts = await endpoints.call(_facts_of)
    if not facts.has_chat_template:
        raise ConfigError(
            f"{facts.name[:MAX_NAME_CHARS]} has no chat template, so it cannot chat; continue a text with "
            "`outrider run`, or serve a target that has one"
        )
    return facts
