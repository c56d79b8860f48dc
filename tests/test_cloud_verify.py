"""Tests /v1/verify over real HTTP: batches, bad items among good ones, held prefixes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.serving import JSON, FakeServer, code_of, target_tokens

from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.verify import VerifyAnswer, VerifyResult

PREFIX = [5, 17, 99, 3]
SAMPLED = {"temperature": 0.9, "seed": 11}


def verify(client: httpx.Client, *items: Any) -> list[VerifyResult]:
    answer = client.post("/v1/verify", json={"items": items})
    assert answer.status_code == 200, answer.text
    return VerifyAnswer.model_validate_json(answer.content).results


@pytest.mark.parametrize("params", [{}, SAMPLED])
@pytest.mark.parametrize("num_correct", [0, 3, 5])
def test_an_item_gets_its_accepted_drafts_and_one_more(
    client: httpx.Client, params: dict[str, Any], num_correct: int
) -> None:
    """The tokens are the accepted drafts and the target's next token."""
    expected = target_tokens(PREFIX, 6, SamplingParams(**params))
    draft = expected[:5]
    if num_correct < 5:
        draft[num_correct] = (draft[num_correct] + 1) % 300
    (result,) = verify(client, {"prefix": PREFIX, "draft": draft} | params)
    assert (result.accepted, result.tokens) == (num_correct, expected[: num_correct + 1])
    assert result.finish_reason is None and result.error is None


def test_one_bad_item_fails_alone(client: httpx.Client) -> None:
    """Each bad item gets its own error, that of the literal NaN, which JSON libraries write, too; the good items
    beside it are answered. The rule "greedy" overrides the temperature.
    """
    good = {"prefix": PREFIX, "draft": target_tokens(PREFIX, 2)}
    cases: tuple[tuple[Any, str, str | None], ...] = (
        ({"prefix": [300]}, "token_out_of_range", "prefix"),
        ({"prefix": PREFIX, "draft": [5, 301]}, "token_out_of_range", "draft"),
        ({"prefix": PREFIX, "temperature": -1}, "invalid_parameter", "items.3.temperature"),
        ({"prefix": PREFIX, "temperature": 0.00001}, "invalid_parameter", "temperature"),
        ({"prefix": PREFIX, "temperature": float("nan")}, "invalid_parameter", "items.5.temperature"),
        ({"prefix": PREFIX, "min_p": float("inf")}, "invalid_parameter", "items.6.min_p"),
        ({"prefix": PREFIX, "top_p": 0}, "invalid_parameter", "items.7.top_p"),
        ({"prefix": []}, "empty_prompt", None),
        ({"prefix": [1] * 5000}, "context_length_exceeded", None),
        ({"prefix": PREFIX, "prefix_hash": "00" * 16}, "prefix_not_held", None),
        ({"prefix": PREFIX, "stop_ids": [300]}, "token_out_of_range", "stop_ids"),
        ({"prefix": PREFIX, "unknown": 1}, "invalid_parameter", "items.12.unknown"),
        ("not an item", "invalid_parameter", "items.13"),
    )
    items = [good, *(item for item, _, _ in cases), good, {"prefix": PREFIX, "rule": "greedy"} | SAMPLED]
    answer = client.post("/v1/verify", content=json.dumps({"items": items}), headers=JSON)
    first, *bad, last, greedy = VerifyAnswer.model_validate_json(answer.content).results
    assert [each.error and (each.error.code, each.error.param) for each in bad] == [error[1:] for error in cases]
    assert first.tokens == last.tokens == target_tokens(PREFIX, 3) and greedy.tokens == target_tokens(PREFIX, 1)


def test_a_held_prefix_is_continued_by_its_hash(client: httpx.Client) -> None:
    """An answer's prefix_hash stands for the prefix and the answer's tokens; it is valid once."""
    expected = target_tokens(PREFIX, 10)
    (first,) = verify(client, {"prefix": PREFIX, "draft": expected[:4]})
    assert first.prefix_hash is not None and first.tokens == expected[:5]
    (second,) = verify(client, {"prefix_hash": first.prefix_hash, "draft": expected[5:8]})
    assert second.tokens == expected[5:9] and second.accepted == 3


def test_a_single_unknown_prefix_is_a_409(client: httpx.Client) -> None:
    """When all items fail with one status, the answer has it too; the error is in both places."""
    answer = client.post("/v1/verify", json={"items": [{"prefix_hash": "00" * 16, "prefix": [1]}]})
    error, result = answer.json()["error"], answer.json()["results"][0]
    assert answer.status_code == 409 and error["code"] == result["error"]["code"] == "prefix_not_held"
    assert "tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"items":[]}', "invalid_parameter", "items"),
        (b"{}", "invalid_parameter", "items"),
        (b'{"items":[{"prefix":[1]}],"more":1}', "invalid_parameter", "more"),
        (b'{"items":[{"prefix":[1]}', "malformed_json", None),
        (b"", "malformed_json", None),
        (b"[1]", "invalid_parameter", "body"),
    ],
)
def test_a_bad_envelope_fails_the_call(client: httpx.Client, body: bytes, code: str, param: str | None) -> None:
    """An error outside the items fails all items."""
    answer = client.post("/v1/verify", content=body, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


def test_finish_reasons_are_reported(client: httpx.Client) -> None:
    """stop, length and context, each where it applies; none while the text can continue."""
    expected, longest = target_tokens(PREFIX, 5), 4096
    drafted = {"prefix": PREFIX, "draft": expected[:4]}
    items = drafted | {"stop_ids": [expected[2]]}, drafted | {"max_tokens": 2}, {"prefix": [7] * (longest - 1)}, drafted
    results = verify(client, *items)
    assert [result.finish_reason for result in results] == ["stop", "length", "context", None]
    assert [each.tokens for each in results[:2]] == [expected[: expected.index(expected[2]) + 1], expected[:2]]


def test_concurrent_calls_get_their_own_results(client: httpx.Client, server: FakeServer) -> None:
    """Each call has several items; its results are in the order of its items."""

    def call(n: int) -> list[list[int]]:
        return [result.tokens for result in verify(client, *({"prefix": [n + 1, k + 1]} for k in range(5)))]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert results == [[target_tokens([n + 1, k + 1], 1) for k in range(5)] for n in range(8)]
    server.wait_until(lambda: server.core.engine.stats().running == 0)


def test_another_tokenizer_is_refused(client: httpx.Client, server: FakeServer) -> None:
    """Another tokenizer's fingerprint gives a 409; the server's own is accepted."""
    body = {"items": [{"prefix": [1]}], "tokenizer": "f" * 64}
    assert code_of(client.post("/v1/verify", json=body)) == (409, "tokenizer_mismatch")
    own = server.core.model.tokenizer.fingerprint
    assert client.post("/v1/verify", json=body | {"tokenizer": own}).status_code == 200
