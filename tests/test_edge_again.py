"""Tests when a text is tried again, and when not: errors that end a stream, and the pauses between tries."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from tests.agents import generate, scripted_client
from tests.test_edge_resume import ONE, PROMPT, Answer, Script, ended, opened, session, stream

from outrider.edge.results import GenerationRequest
from outrider.models.errors import CloudError, RequestError
from outrider.models.wire.protocol import Commit, ErrorBody


def failing(code: str, kind: str = "server_error", num_tokens: int = 0) -> Answer:
    """A session that an error ends, after some tokens."""
    end = ended("error").model_copy(update={"error": ErrorBody(code=code, message="no", type=kind)})
    return session(opened(), *[Commit(base=0, tokens=[7] * num_tokens)] * bool(num_tokens), end)


@pytest.mark.parametrize(
    ("code", "kind", "status", "is_its_own"),
    [
        ("grammar_too_complex", "invalid_request_error", 400, False),
        ("unauthorized", "authentication_error", 401, True),
        ("upstream_refused", "server_error", 502, True),
    ],
)
async def test_a_refusal_that_ends_a_stream_is_one(code: str, kind: str, status: int, is_its_own: bool) -> None:
    """It is not tried again there, and the caller gets it; another endpoint may serve where it is that one alone."""
    first, other = Script(failing(code, kind, 1)), Script(session(opened(), Commit(base=0, tokens=[5]), ended()))
    request = GenerationRequest(PROMPT, max_tokens=2)
    with pytest.raises(RequestError, match="no") as refused:
        await stream(first, request)
    assert (refused.value.code, refused.value.status, len(first.requests)) == (code, status, 1)
    clients = [scripted_client(Script(failing(code, kind, 1))), scripted_client(other, "http://other")]
    with nullcontext() if is_its_own else pytest.raises(RequestError):
        assert (await generate(clients, request)).tokens == (7, 5)
    assert len(other.requests) == is_its_own


async def test_a_text_on_which_a_model_fails_is_tried_once_more_at_each_endpoint() -> None:
    """Another replica may serve it, or the same one later; each token counts as progress. No more: it may fail always,
    and costs each time what a text costs.
    """
    fault, rest = failing("model_fault"), session(opened(), Commit(base=0, tokens=[5]), ended())
    request = GenerationRequest(PROMPT, max_tokens=3)
    faults = [failing("model_fault", num_tokens=1)] * 2
    assert (await stream(Script(*faults, rest), request)).tokens == (7, 7, 5)
    assert (await generate([scripted_client(Script(fault)), scripted_client(Script(rest), "http://b")], ONE)).tokens
    one, two = (Script(*[fault] * 9) for _ in range(2))
    with pytest.raises(CloudError, match="model_fault: no"):
        await generate([scripted_client(one), scripted_client(two, "http://two")], ONE)
    assert len(one.requests) == len(two.requests) == 2
