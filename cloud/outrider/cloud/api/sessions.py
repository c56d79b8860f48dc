"""Opens and ends sessions: the event stream of one sequence.

A session lives as long as its stream: when the client leaves, the sequence and its blocks are freed.
"""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.audit import AUDIT
from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.state import Core, Session
from outrider.cloud.api.steady_stream import SteadyStream
from outrider.cloud.api.stream import SessionStream, SessionText
from outrider.cloud.api.traces import SequenceWatch, trace_of
from outrider.cloud.seam import DraftHints, GenerateRequest, PickOptions
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http import sse
from outrider.models.http.bodies import is_no_store, owner_of, read_body, sampling_of
from outrider.models.http.encoding import check_tokens
from outrider.models.http.errors import FieldError
from outrider.models.http.request_context import current_request, session_tag
from outrider.models.processors.options import processors_of
from outrider.models.wire.protocol import SessionOpen, SessionRequest
from outrider.models.wire.steady import pace_of

_SESSION_ID_BYTES = 9


def session_routes(core: Core) -> APIRouter:
    """The routes that open and end sessions."""
    router = APIRouter(tags=["sessions"])

    @router.post("/v1/sessions", status_code=200, response_class=sse.EventStream)
    async def open_session(request: Request) -> Response:
        """Opens a session and answers with its event stream: SessionOpen, then Commits, then SessionEnd."""
        arrived_s = time.monotonic()
        owner = owner_of(request)
        core.slots.require(owner)  # as for completions
        body = await core.bodies.parse(owner, SessionRequest, await read_body(request.receive))
        core.require_tokenizer(body.tokenizer)
        model = core.model.named(body.model)
        if body.steady and core.model.mid is not None:
            raise FieldError(
                "unsupported_parameter",
                "steady is not supported by a cascade, whose link to its target's verifier has no fixed pace; use that "
                "verifier, or leave out --steady",
                param="steady",
            )
        check_tokens(core.engine.limits.max_positions, body.prompt)  # before it is copied and looked up
        if body.stop and body.prefix_hash is not None and body.generated > len(body.prompt):
            raise FieldError(
                "invalid_parameter",
                "stop: part of the text is in the hashed prefix, where no stop string is looked for; send its tokens",
                param="stop",
            )
        if body.prefix_hash is None and body.generated > len(body.prompt):
            raise FieldError(
                "invalid_parameter",
                f"generated: it is {body.generated}, and prompt has {len(body.prompt)} tokens; send those of the text",
                param="generated",
            )
        asker = model.asker(owner, body.cache_salt)
        spec = None
        if body.grammar is not None:
            with core.slots.hold(owner):  # bounds how many wait for the thread
                spec = await core.grammars.spec(core.workers, owner, asker.salt, GrammarSpec.of_wire, body.grammar)
        grammar = await core.grammars.compiled(spec, owner, asker.salt)
        generate = GenerateRequest(
            prompt=tuple(body.prompt),
            pick=PickOptions(
                body.rule.apply(sampling_of(body.sampling)),
                sampling_of(lambda: processors_of(body)),
                grammar,
                body.logprobs,
            ),
            max_tokens=body.max_tokens,
            stop_ids=core.stop_set(body.stop_ids, body.ignore_eos, grammar),
            hints=DraftHints(patience_ms=body.patience_ms, lag_ms=body.draft_lag_ms),
            asker=asker,
            adapter=model.adapter,
            prefix_hash=body.prefix_hash,
            num_generated=body.generated,
            keep=body.keep_prefix,
            provisional=body.provisional,
        )
        mailbox = core.bridge.mailbox()
        generate = await core.admission.sought(generate)
        recalled = await core.recall(generate, is_allowed=not is_no_store(request))
        num_recent = len(recalled.request.hints.recent)
        recalled = recalled.predicted(body.prediction)
        entry = request.scope.get(AUDIT)
        asked = Asked(arrived_s, body.priority, body.deadline_ms, entry, is_steady=body.steady)
        core.slots.take(owner)
        try:
            step_ms = core.step_times().step_ms
            pace = pace_of(body.logprobs, core.slots.taken(owner), step_ms) if body.steady else None
            sink = recalled.sink(mailbox.sink())
            session = Session(core.admission.submit(recalled.request, sink, asked), owner, DraftLine(pace))
        except BaseException:
            core.slots.release(owner)
            raise
        session_id = core.settings.session_prefix + secrets.token_urlsafe(_SESSION_ID_BYTES)
        core.sessions[session_id] = session
        if (current := current_request()) is not None:
            current.session = session_tag(session_id)
        if (trace := trace_of(request.scope)) is not None:
            trace.asked(generate.pick.params, generate.max_tokens, model.name)

        def close() -> None:
            core.engine.cancel(session.sequence_id)
            session.line.close()
            core.sessions.pop(session_id, None)
            core.slots.release(owner)

        try:
            times = core.step_times()
            opened = SessionOpen(
                session=session_id,
                model=model.name,
                stop_ids=sorted(generate.stop_ids),
                max_positions=core.engine.limits.max_positions,
                step_ms=times.step_ms,
                draft_token_ms=times.draft_token_ms,
                vocab_size=core.engine.limits.vocab_size,
                target=model.target,
                keep_alive_s=core.settings.keep_alive_s,
                mid=core.model.mid,
                recent_tokens=num_recent or None,
                steady=pace,
            )
            watched = SequenceWatch(core.metrics, request.scope, arrived_s)
            text: SessionText | None = None
            if body.stop:
                # In a thread: it goes through all of `generated`, half a second for 32,000 tokens.
                known = (core.model.tokenizer, body.stop, generate.stop_ids, body.prompt, body.generated)
                text = await core.workers.run(owner, SessionText, *known)
            return (SessionStream if pace is None else SteadyStream)(
                opened,
                mailbox,
                watched,
                close,
                keep_alive_s=core.settings.keep_alive_s,
                step_times=core.step_times,
                line=session.line,
                text=text,
                on_stop=lambda: core.engine.cancel(session.sequence_id, "stop"),
            )
        except BaseException:
            close()
            raise

    @router.delete("/v1/sessions/{session_id}", status_code=204, response_class=Response)
    async def end_session(session_id: str, request: Request) -> Response:
        """Ends a session: its stream closes with the reason "cancelled"."""
        core.engine.cancel(core.sessions.find(session_id, owner_of(request)).sequence_id)
        return Response(status_code=204)

    return router
