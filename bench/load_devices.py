"""Plays many devices against one verifier, for `bench.load`: bare sockets, drafts that were drafted beforehand.

64 drafts on the device's core would be late for each other, as 64 devices are not. A text is the same in every run, so
what the draft guesses along it is too: it is recorded once, and looked up while the clock runs. What was not recorded
(a branch of a tree that no run asked for before) is drafted then, and counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from bench.bare_http import Wire

from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import DepthController, DraftPlan
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.modes.stream import tree_message
from outrider.edge.results import GenerationRequest
from outrider.models.errors import CloudError
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE

LEAST_REACH: Final = 5e-4
SEND_FLOOR: Final = 0.01
MAX_DEPTH: Final = 64
MAX_SENT: Final = 256


def body_of(request: GenerationRequest) -> dict[str, Any]:
    """Of POST /v1/sessions."""
    return {
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": request.params.temperature,
        "seed": request.params.seed,
        "ignore_eos": True,
    }


class Guesser(Protocol):
    """A draft along one text."""

    def guess(self, num_known: int, branch: Sequence[int]) -> list[Guess]:
        """What follows `branch` after the first `num_known` tokens of the text."""


class Recorded:
    """The draft's guesses along one text, which may grow, and off it. One runtime serves all texts."""

    def __init__(self, drafter: ModelDrafter, order: GenerationRequest, text: Sequence[int], width: int) -> None:
        self._drafter, self._order, self._text, self._width = drafter, order, text, width
        self._found: dict[tuple[int, tuple[int, ...]], list[Guess]] = {}
        self.num_drafted = 0

    def guess(self, num_known: int, branch: Sequence[int]) -> list[Guess]:
        """What follows `branch` after the first `num_known` tokens of the text."""
        on_text = 0
        left = self._text[num_known:]
        while on_text < min(len(branch), len(left)) and branch[on_text] == left[on_text]:
            on_text += 1
        key = (num_known + on_text, tuple(branch[on_text:]))
        if key not in self._found:
            self.num_drafted += 1
            self._drafter.begin([*self._order.prompt, *self._text[: key[0]]], self._order.params)
            (self._found[key],) = self._drafter.guess([key[1]], self._width)
        return self._found[key]

    def record(self, num_calls: int) -> None:
        """Drafts beforehand what a device asks for that answers commits of any size with `num_calls` expansions."""
        for step in range(1, 5):
            device = Device(self, num_calls, self._width)
            for base in range(0, len(self._text), step):
                device.on_commit(base, self._text[base : base + step])
                device.answer()


class Device:
    """One session's guesses: an answer expands `num_calls` nodes, the likeliest first.

    depth: says how far to draft; without one, always on. estimates: what it goes by, and the calibration; kept from
    text to text, as an agent keeps them.
    """

    def __init__(
        self,
        recorded: Guesser,
        num_calls: int,
        width: int,
        depth: DepthController | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        self.estimates = estimates or Estimates()
        self._recorded, self._num_calls, self._width = recorded, num_calls, width
        self._depth = depth or DepthController(DraftPlan(MAX_DEPTH))
        self._belief = Belief(self.estimates.calibration.chance, LEAST_REACH if width > 1 else 0.0)

    def on_commit(self, base: int, tokens: Sequence[int]) -> bool:
        """Takes a commit. Returns whether any of its tokens was not the first guess."""
        outcome = self._belief.on_commit(base, tokens)
        self.estimates.on_commit(outcome, None)
        self._depth.observe(outcome)
        self._belief.tree.replant()
        return len(outcome.hits) < len(outcome.tokens) or any(node.rank for node in outcome.hits)

    def answer(self) -> bytes | None:
        """Expands nodes; the message with the new ones, None without any."""
        self.expand()
        return self.message()

    def expand(self) -> bool:
        """Expands nodes. Returns whether any was worth it."""
        tree, plan, num_expanded = self._belief.tree, self._depth.plan(), 0
        while num_expanded < self._num_calls and (nodes := tree.take_best(1, plan.floor, plan.depth)):
            tree.expand(nodes[0], self._recorded.guess(len(self._belief.known), nodes[0].path()))
            num_expanded += 1
        return num_expanded > 0

    @property
    def has_sent(self) -> bool:
        """Whether the verifier has a guess of the next token."""
        return self._belief.tree.has_sent

    def message(self) -> bytes | None:
        """With the nodes that are not sent yet; None without any, and where the plan is silent."""
        if self._depth.plan().silent:
            return None
        unsent = self._belief.tree.take_unsent(SEND_FLOOR if self._width > 1 else 0.0, MAX_SENT)
        return tree_message(len(self._belief.known), unsent).body if unsent else None


@dataclass(slots=True)
class Session:
    """What one session received. commits: the arrival of each, by the clock, and its tokens."""

    commits: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(token for _, tokens in self.commits for token in tokens)


async def run_sessions(
    url: str,
    orders: Sequence[GenerationRequest],
    devices: Sequence[Device | None],
    rtt_ms: float = 0.0,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> list[Session]:
    """Runs all sessions at once; a device of None drafts nothing. rtt_ms: added to what a device's answer takes.
    fields: more of each body.
    """
    pairs = zip(orders, devices, strict=True)
    return list(await asyncio.gather(*(_run(url, {**body_of(o), **fields}, d, rtt_ms) for o, d in pairs)))


async def _run(url: str, body: Mapping[str, Any], device: Device | None, rtt_ms: float) -> Session:
    session, number = Session(), ""
    posts: set[asyncio.Task[None]] = set()
    async with Connection(url) as stream:
        await stream.post("/v1/sessions", body)
        async with Connection(url) as drafts:
            while (event := await stream.event()) is not None:
                if event.get("type") == "open":
                    number = event["session"]
                elif event.get("type") == "end":
                    if event["reason"] != "length":
                        raise CloudError(f"a session ended with {event}; expected its full length")
                    break
                else:
                    session.commits.append((time.perf_counter(), tuple(event["tokens"])))
                    if device is None:
                        continue
                    device.on_commit(event["base"], event["tokens"])
                    drafted = device.answer()
                    if drafted is not None:
                        path = f"/v1/sessions/{number}/drafts"
                        post = asyncio.create_task(drafts.post_draft(rtt_ms / 1e3, path, drafted))
                        posts.add(post)
            for post in posts:
                if post.done():
                    post.result()  # raises what it failed with: a device that cannot send is no device
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)
    return session


class Connection(Wire):
    """A device's connection for its drafts, or a client's of /v1/verify."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._turn = asyncio.Lock()

    async def post_draft(self, delay_s: float, path: str, body: bytes) -> None:
        """Posts a draft after a delay, one at a time. An answer other than 204 is left alone, as an agent does.

        Connects again where the server has closed: it keeps no connection that is idle for long.
        """
        if delay_s:
            await asyncio.sleep(delay_s)
        async with self._turn:
            try:
                await self.post(path, body, TREE_MEDIA_TYPE)
                await self.answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                self.writer.close()
                await self.open()
                await self.post(path, body, TREE_MEDIA_TYPE)
                await self.answer()

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts JSON and returns the answer's. Raises CloudError where it is not a 200."""
        await self.post(path, body)
        head, answer = await self.answer()
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise CloudError(f"the verifier answered {head.splitlines()[0].decode()}: {answer[:500].decode()}")
        found: dict[str, Any] = json.loads(answer)
        return found
