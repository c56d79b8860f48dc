"""Plays many devices against one verifier, for `bench.load`: bare sockets, drafts that were drafted beforehand.

64 drafts on the device's core would be late for each other, as 64 devices are not. A text is the same in every run, so
what the draft guesses along it is too: it is recorded once, and looked up while the clock runs. What was not recorded
(a branch of a tree that no run asked for before) is drafted then, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed

LEAST_REACH: Final = 5e-4
SEND_FLOOR: Final = 0.01
MAX_DEPTH: Final = 64
MAX_SENT: Final = 256
_HEAD: Final = (
    b"POST /v1/sessions/%s/drafts HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: " + DRAFTS_MEDIA_TYPE.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
)


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
    url: str, orders: Sequence[GenerationRequest], devices: Sequence[Device | None]
) -> list[Session]:
    """Runs all sessions at once; a device of None drafts nothing. Raises CloudError where one is refused or cut."""
    return list(await asyncio.gather(*(_run(url, body_of(o), d) for o, d in zip(orders, devices, strict=True))))


async def _run(url: str, body: Mapping[str, Any], device: Device | None) -> Session:
    """Drafts go up one long request, as an agent's do."""
    session = Session()
    async with Wire(url) as stream, Wire(url) as drafts:
        await stream.post("/v1/sessions", body)
        while (event := await stream.event()) is not None and event.get("type") != "end":
            if event.get("type") == "open" and device is not None:
                await drafts.send(_HEAD % event["session"].encode())
            elif "tokens" in event:
                session.commits.append((time.perf_counter(), tuple(event["tokens"])))
                if device is not None:
                    device.on_commit(event["base"], event["tokens"])
                    if (drafted := device.answer()) is not None:
                        piece = framed(drafted)
                        await drafts.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        if event is None or event["reason"] != "length":
            raise CloudError(f"a session ended with {event}; expected its full length")
        # A device that cannot send is no device.
        if device is not None and b" 204 " not in (answer := (await drafts.answer())[0]):
            raise CloudError(f"the drafts were answered {answer.decode()}")
    return session
