"""Generates in stream mode: drafts ahead, sends the drafts, takes commits, and drafts on from them.

The network runs on the event loop, drafting in one worker thread; neither waits for the other. A commit that
contradicts the belief stops the draft at its next token, and drafting starts again from the committed tokens at once.
The plain twin of this module is `stop_and_wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.calibration import LOOKUP_RANK
from outrider.edge.drafting.depth import DepthController, Effort, FixedDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.ladder import WaitingDrafter
from outrider.edge.drafting.price import BYTES_PER_TOKEN, SendPrice
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.drafting.worker import Drafting, OnCall, TreeLimits
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.origin import TextOrigin
from outrider.edge.link.sender import DraftSender, Posts
from outrider.edge.modes.recorder import Recorder, trace_result
from outrider.edge.results import GenerationRequest, GenerationResult, HeldPrefix, Mode, OnTokens
from outrider.models.client import tracing
from outrider.models.client.client import VerifierClient
from outrider.models.client.long_request import LongRequest
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import PLAIN_TERMS, Rule, RuleTerms
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.text.predicted import PredictionFollower
from outrider.models.wire.protocol import (
    MAX_PATH_TOKENS,
    TREES_SINCE,
    TURNS_SINCE,
    Commit,
    DraftRequest,
    SessionEnd,
    SessionOpen,
    SessionRequest,
)
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft, level_of


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What a device drafts and sends.

    tree: its limits. bytes_per_token: of draft messages, at most. terms: how the target accepts; in stream mode coupled
    or greedy. For `make_agent` only: effort: how much the cost model drafts.
    is_looked_up: a tree also has what followed the same tokens before.
    """

    tree: TreeLimits = field(default_factory=TreeLimits)
    bytes_per_token: float = BYTES_PER_TOKEN
    effort: Effort = Effort.NORMAL
    is_looked_up: bool = True
    terms: RuleTerms = PLAIN_TERMS


class StreamAgent:
    """Generates in stream mode, one text at a time; its measurements are kept for the next.

    drafter: None is cloud-only streaming. depth: shares `estimates` if it uses any. wrap_posts: wraps the client that
    drafts are posted to, to inject faults. scheduler: its thread drafts; agents of one draft model share it. on_begin,
    on_call: set them to watch a text; the first is called when it begins, the other as `DraftWorker` does. Belongs
    to one event loop at a time.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        drafter: Drafter | None = None,
        depth: DepthController | None = None,
        estimates: Estimates | None = None,
        options: AgentOptions | None = None,
        wrap_posts: Callable[[VerifierClient], Posts] | None = None,
        scheduler: DraftScheduler | None = None,
    ) -> None:
        self.endpoints = endpoints
        self.drafter = drafter
        self.estimates = estimates or Estimates()
        self.depth = depth or FixedDepth(0)
        self.options = options or AgentOptions()
        self.wrap_posts = wrap_posts or (lambda client: client)
        self.scheduler = scheduler or DraftScheduler()
        self.clock = self.scheduler.clock
        # Servers that are cascades, as a text's origin or their `open` says: they are asked for provisional tokens.
        self.with_mid: set[str] = set()
        self.without_prefixes: set[str] = set()  # servers that refuse the fields of held prefixes: older ones
        self.without_texts: set[str] = set()  # servers that refuse stop strings and predictions: older ones
        self.on_begin: Callable[[DraftAhead], None] = lambda ahead: None
        self.on_call: OnCall | None = None

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None, origin: TextOrigin | None = None
    ) -> GenerationResult:
        """Generates one text; `on_tokens` is called on the loop with each commit's tokens as they arrive.

        origin: given where it is known which target must serve the text.

        Raises CloudError when no endpoint is left, RequestError and TokenizerMismatch when the server refuses.
        Cancelling the task ends the session. Neither that nor the text's end waits for a call of the drafter. One that
        fails only ends the drafting: the result's `draft_error` has the reason.
        """
        with tracing.span("text") as span:
            result = await _Generation(self, request, on_tokens, origin).run()
            trace_result(span, request, result)
            return result


class _Generation:
    """The network side of one text in stream mode."""

    def __init__(
        self, agent: StreamAgent, request: GenerationRequest, on_tokens: OnTokens | None, origin: TextOrigin | None
    ) -> None:
        self._agent = agent
        self._origin = origin
        self._request = request
        options, estimates = agent.options, agent.estimates
        mode = Mode.STREAM if agent.drafter else Mode.CLOUD_ONLY
        drafter = agent.drafter or WaitingDrafter()  # without one only the known tokens are kept
        self._recorder = Recorder(mode, on_tokens, agent.clock, options.terms.rule)
        self._result = self._recorder.result
        self._sender = DraftSender(estimates.on_posted, clock=agent.clock, on_free=lambda: self._ahead.pump())
        self._ahead = DraftAhead(
            request,
            Drafting(drafter, agent.depth, estimates, options.tree, agent.scheduler, agent.on_call),
            SendPrice(options.bytes_per_token, is_path=options.tree.width == 1),
            self._send,
            lambda: self._posts is not None and self._sender.is_free and (self._line is None or self._line.has_room),
        )
        agent.on_begin(self._ahead)
        if origin is not None and origin.began is not None and origin.began.has_mid:
            agent.with_mid.add(origin.began.url)
        self._posts: Posts | None = None  # None until the first session is open
        self._line: LongRequest | None = None  # of a steady session
        self._session = ""
        self._client: VerifierClient | None = None
        self._session_start = 0  # tokens known when the session was opened
        self._takes_trees = True
        # The last path for a server that takes no trees, and the number of tokens known before it.
        self._path: list[int] = []
        self._path_base = 0
        # Where the text ends besides its length, as the server that began it reported.
        self._stop_ids: frozenset[int] | None = None
        self._max_positions: int | None = None
        self._opening_at = self._last_commit_at = 0.0
        self._held = request.held
        self._asked: SessionRequest | None = None

    async def run(self) -> GenerationResult:
        wire_before = self._agent.endpoints.wire
        reason: str | None = None
        try:
            self._ahead.pump()  # the draft reads the prompt while the target does
            stream = self._agent.endpoints.session_events(self._next_request, self._origin, self._can_ask_again)
            async with aclosing(stream) as events:
                async for event, client in events:
                    if isinstance(event, SessionOpen):
                        self._on_open(event, client)
                    elif isinstance(event, Commit):
                        self._on_commit(event)
                    else:
                        reason = self._on_end(event, client)
                    self._ahead.pump()
        finally:
            self._ahead.close()
            await self._sender.aclose()
        result, ahead, sender = self._result, self._ahead, self._sender
        result.num_drafted, result.draft_error = ahead.num_drafted, ahead.error
        result.num_sent, result.hits = ahead.num_sent, dict(ahead.hits)
        result.num_turns = ahead.num_turns
        result.turns = self._agent.estimates.turns.words(ahead.num_turns) if ahead.num_drafted else ""
        result.num_posts, result.num_failed_posts = sender.num_sent, sender.num_failed
        reason = reason or self._over()  # the server's is missing when the stream is cut after the last token
        assert reason is not None, "the sessions ended before the text did"
        return self._recorder.finish(reason, self._agent.endpoints.wire - wire_before)

    def _next_request(self, url: str) -> SessionRequest | None:
        """The next session to open: all committed tokens are part of its prompt, so positions stay the same.

        A held prefix stands for the prompt's beginning until the first commit: the server takes its hash once.
        """
        known, request = self._ahead.known, self._request
        if self._over() is not None:
            return None
        self._session_start = len(known)
        self._posts = None
        self._sender.drop()
        self._agent.estimates.use(url)
        self._opening_at = self._agent.clock()
        held = self._held if not known and self._held is not None and self._held.url == url else None
        self._asked = SessionRequest(
            prompt=[*request.prompt[held.length if held else 0 :], *known],
            max_tokens=request.max_tokens - len(known),
            patience_ms=None if self._agent.drafter else 0.0,
            draft_lag_ms=self._agent.estimates.lag_ms if self._agent.drafter else None,
            tokenizer=request.tokenizer,
            prefix_hash=held.name if held else None,
            keep_prefix=request.keeps_prefix and url not in self._agent.without_prefixes,
            provisional=self._agent.drafter is not None and url in self._agent.with_mid,
            **request.service_fields(),
            **(request.wire_fields(len(known)) | self._text_fields(url)),
        )
        return self._asked

    def _text_fields(self, url: str) -> dict[str, Any]:
        """What is asked of the text besides sampling; left out where it is nothing, for older servers."""
        request, known, rule = self._request, self._ahead.known, self._agent.options.terms.rule
        fields: dict[str, Any] = {} if rule is Rule.COUPLED else {"rule": rule}
        if request.num_logprobs is not None:
            fields["logprobs"] = request.num_logprobs
        if url in self._agent.without_texts:
            return fields
        if request.stop:
            fields["stop"] = list(request.stop)
            fields["generated"] = request.num_generated + len(known)
        if request.prediction:
            follower = PredictionFollower(request.prediction)
            follower.push([*request.prompt[len(request.prompt) - request.num_generated :], *known])
            fields["prediction"] = list(follower.rest)
        return fields

    def _can_ask_again(self, url: str, error: RequestError) -> bool:
        """Whether the refusal is of what can be done without: a prefix's hash, hints, and stop strings, which the
        caller cuts at too. Logprobs are not among them.
        """
        asked, agent = self._asked, self._agent
        assert asked is not None
        if error.code == "deadline_exceeded":
            return self._over() is not None  # a text that has begun ends with what it has
        if error.code == "prefix_not_held" and asked.prefix_hash is not None:
            self._held = None
        elif error.code != "invalid_parameter":
            return False
        elif asked.stop or asked.prediction:
            agent.without_texts.add(url)
        elif asked.provisional:
            agent.with_mid.discard(url)
        elif asked.prefix_hash is not None or asked.keep_prefix:
            self._held = None
            agent.without_prefixes.add(url)
        else:
            return False
        return True

    def _over(self) -> str | None:
        """Why nothing is left to generate, in the server's words; None if something is."""
        known, request = self._ahead.known, self._request
        if known and self._stop_ids is not None and known[-1] in self._stop_ids:
            return "stop"
        if len(known) >= request.max_tokens:
            return "length"
        if known and request.left_ms <= 0.0:
            return "deadline"
        is_full = self._max_positions is not None and len(request.prompt) + len(known) >= self._max_positions
        return "context" if is_full else None

    def _on_open(self, event: SessionOpen, client: VerifierClient) -> None:
        self._result.num_sessions += 1
        (self._agent.with_mid.add if event.mid is not None else self._agent.with_mid.discard)(client.url)
        if self._result.num_sessions == 1 and self._asked is not None:
            self._result.num_prompt_sent = len(self._asked.prompt)
            self._result.num_recent = event.recent_tokens or 0
        self._held = None  # the server has taken it
        if not self._ahead.known:  # later sessions go on with the same target
            self._stop_ids, self._max_positions = frozenset(event.stop_ids), event.max_positions
        self._posts, self._session, self._client = self._agent.wrap_posts(client), event.session, client
        self._sender.max_in_flight = client.max_in_flight(event.session)
        self._line = client.frames(event.session)
        if self._line is not None:
            self._line.on_frame = self._ahead.flush
        self._takes_trees, self._path = event.protocol >= TREES_SINCE, []
        took_ms = (self._agent.clock() - self._opening_at) * 1e3
        self._agent.estimates.on_open(
            took_ms,
            event.step_ms,
            event.draft_token_ms,
            no_turns=why_no_turns(event, is_fixed=isinstance(self._agent.depth, FixedDepth)) if client.is_local else "",
        )
        self._last_commit_at = 0.0
        self._ahead.resend()

    def _on_commit(self, commit: Commit) -> None:
        now = self._agent.clock()
        if commit.provisional:
            self._ahead.on_provisional(self._session_start + commit.base, commit.tokens)
            return
        self._agent.estimates.on_times(commit.step_ms, commit.draft_token_ms)
        # The first commit of a session ends its prefill, so it does not measure a step.
        interval_ms = (now - self._last_commit_at) * 1e3 if self._last_commit_at else None
        outcome = self._ahead.on_commit(self._session_start + commit.base, commit.tokens, interval_ms)
        self._last_commit_at = now
        if outcome.tokens:
            self._recorder.depth(self._ahead.plan.depth)
            ranks = tuple(node.rank for node in outcome.hits)
            others = frozenset(index for index, rank in enumerate(ranks) if 0 < rank < LOOKUP_RANK)
            self._recorder.commit(
                outcome.tokens,
                commit.accepted,
                commit.proposed,
                may_reject=outcome.contradicts_at(commit.accepted),
                ranks=ranks,
                alternatives=others,
                logprobs=_logprobs(commit, len(outcome.tokens)),
            )

    def _on_end(self, end: SessionEnd, client: VerifierClient) -> str:
        self._result.waited_ms += end.usage.waited_ms
        self._result.cut = end.cut
        if self._result.num_sessions == 1:
            self._result.cached_prompt_tokens = end.usage.cached_prompt_tokens
        if end.prefix_hash is not None and self._request.keeps_prefix:
            length = len(self._request.prompt) + len(self._ahead.known)
            self._result.held = HeldPrefix(client.url, end.prefix_hash, length)
        return end.reason

    def _send(self, num_known: int, nodes: Sequence[GuessNode], is_turn: bool) -> int:
        assert self._posts is not None
        base = num_known - self._session_start
        if self._takes_trees:
            message = tree_message(base, nodes, is_turn)
        else:
            path = self._ahead.path()[:MAX_PATH_TOKENS]
            since_last = [*self._ahead.known[self._path_base :], *path]
            if since_last == self._path[: len(since_last)]:
                return 0  # the new nodes are alternatives
            self._path, self._path_base = path, num_known
            message = path_message(base, path)
        session = self._session
        self._sender.send(self._posts, session, message, lambda: self._on_lost(session, nodes))
        return len(message.body)

    def _on_lost(self, session: str, nodes: Sequence[GuessNode]) -> None:
        if session == self._session:
            assert self._client is not None
            self._sender.max_in_flight = self._client.max_in_flight(session)  # fewer where the long request failed
            self._path = []
            self._ahead.lost(nodes)


def why_no_turns(opened: SessionOpen, *, is_fixed: bool) -> str | None:
    """Why device and target do not take turns on one machine, in words; None where they can. is_fixed: the depth."""
    obstacles = {
        "the depth is fixed": is_fixed,
        "the session is steady": opened.steady is not None,
        "the server is a cascade": opened.mid is not None,
        "the server is too old": opened.protocol < TURNS_SINCE,
    }
    return next((words for words, is_so in obstacles.items() if is_so), None)


def _logprobs(commit: Commit, num_new: int) -> tuple[TokenLogprobs, ...]:
    """Of the last `num_new` tokens of a commit: those that are new."""
    if not commit.logprobs:
        return ()
    pairs = list(zip(commit.tokens, commit.logprobs, strict=True))[len(commit.tokens) - num_new :]
    return tuple(TokenLogprobs(token, each.logprob, tuple(each.top)) for token, each in pairs)


def tree_message(base: int, nodes: Sequence[GuessNode], is_turn: bool = False) -> DraftMessage:
    """The message with these nodes, which are numbered one after the other; `base` tokens are known in the session.

    is_turn: as in TreeDraft.
    """
    first = nodes[0].number if nodes else 0
    assert first is not None
    # Only the root has no parent: what follows it follows the last known token, whatever the server has forgotten.
    ups = [node.parent for node in nodes]
    parents = [ROOT if up is None or up.parent is None or up.number is None else up.number for up in ups]
    levels = [level_of(node.chance) for node in nodes]
    draft = TreeDraft(base, first, [node.token for node in nodes], parents, levels, is_turn)
    return DraftMessage(TREE_MEDIA_TYPE, draft.encode())


def path_message(base: int, path: Sequence[int]) -> DraftMessage:
    """The whole path, for a server that knows no trees."""
    request = DraftRequest(base=base, paths=[list(path[:MAX_PATH_TOKENS])])
    return DraftMessage("application/json", request.model_dump_json().encode())
