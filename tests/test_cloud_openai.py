"""Tests the OpenAI-compatible endpoints over plain HTTP: what existing clients send and read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_harness import refused
from tests.local_endpoint import chunks_of, documents_of
from tests.serving import EOS_ID, JSON, FakeServer, StepGate, code_of, fake_tokenizer, serve_fake, target_tokens

from outrider.models.http import openai, openai_answers
from outrider.models.http.answer_text import TextAssembler, TextStyle
from outrider.models.http.encoding import encode_chat
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import ErrorAnswer, RenderAnswer

PROMPT = "def verify("


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    openai_answers.Completion.model_validate_json(answer.content)
    return dict(answer.json())


def expected_tokens(prompt: str = PROMPT, count: int = 30) -> list[int]:
    return target_tokens(fake_tokenizer().encode(prompt), count)


def text_of(tokens: list[int]) -> str:
    return fake_tokenizer().decode(tokens)


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and field of an error in OpenAI's shape."""
    error = ErrorAnswer.model_validate_json(answer.content).error
    return answer.status_code, error.code, error.param


def test_a_completion_is_the_targets_text(client: httpx.Client) -> None:
    """Text, reason and usage of a greedy completion."""
    answer, num_prompt = complete(client, max_tokens=30), len(fake_tokenizer().encode(PROMPT))
    expected = {"index": 0, "text": text_of(expected_tokens()), "logprobs": None, "finish_reason": "length"}
    assert (answer["object"], answer["model"], answer["choices"]) == ("text_completion", "fake", [expected])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 30, "total_tokens": num_prompt + 30}
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"].items() >= (usage | {"completion_tokens_details": details}).items()


def test_a_prompt_may_be_ids_or_several(client: httpx.Client) -> None:
    """A text, its token ids, a list of texts, a list of id lists: choice i belongs to prompt i."""
    ids = fake_tokenizer().encode(PROMPT)
    one, other = complete(client)["choices"][0]["text"], text_of(expected_tokens("zip(", 16))
    assert complete(client, prompt=ids)["choices"][0]["text"] == one
    for prompts in ([PROMPT, "zip("], [ids, fake_tokenizer().encode("zip(")]):
        answer = complete(client, prompt=prompts)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, one), (1, other)]
        assert answer["usage"]["completion_tokens"] == 2 * openai.DEFAULT_MAX_TOKENS == 32


def test_a_stream_gives_the_same_text(client: httpx.Client) -> None:
    """For each choice the joined pieces equal the whole answer; usage comes last, on request."""
    body = {"prompt": [PROMPT, "zip("], "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = complete(client, **body)
    plain = chunks_of(client.post("/v1/completions", json=body | {"stream": True}))
    answer = client.post("/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *pieces, last = chunks_of(answer)
    for chunk in pieces:
        openai_answers.Completion.model_validate(chunk)
    for index in range(2):
        own = [choice for chunk in pieces for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["choices"] for chunk in plain) and len({chunk["id"] for chunk in plain}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: httpx.Client, is_stream: bool) -> None:
    """The stop string is not part of the text, wherever token borders lie; tokens after it do not count."""
    full = text_of(expected_tokens())
    stop = full[9:12]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "ignore_eos": True, "stop": ["\x00never", stop]}
    asked = body | {"stream": is_stream, "stream_options": {"include_usage": True}}
    documents, text = documents_of(client.post("/v1/completions", json=asked))
    reasons = [choice["finish_reason"] for document in documents for choice in document["choices"]]
    assert text == full[: full.index(stop)] and reasons[-1] == "stop"
    count = next(n for n in range(31) if stop in text_of(expected_tokens()[:n]))
    assert documents[-1]["usage"]["completion_tokens"] == count


def test_the_end_token_is_not_part_of_the_text(client: httpx.Client) -> None:
    """A text that ends with the model's end token has the reason "stop", and the token is not shown."""
    prompt = next([n, 1] for n in range(300) if EOS_ID in target_tokens([n, 1], 20)[3:])
    tokens = target_tokens(prompt, 20)
    num_shown = tokens.index(EOS_ID)
    answer = complete(client, prompt=prompt, max_tokens=20, ignore_eos=False)
    expected = {"index": 0, "text": text_of(tokens[:num_shown]), "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [expected] and answer["usage"]["completion_tokens"] == num_shown + 1


def test_a_seed_chosen_by_the_server_is_reported(client: httpx.Client) -> None:
    """Sampling without a seed differs from call to call; the seed in the answer repeats it."""
    body = {"temperature": 1.0, "top_p": 0.95, "top_k": 100, "min_p": 0.001, "max_tokens": 20}
    first, second = complete(client, **body), complete(client, **body)
    text = first["choices"][0]["text"]
    assert first["seed"] != second["seed"] and text != second["choices"][0]["text"]
    params = SamplingParams(1.0, 100, 0.95, 0.001, first["seed"])
    assert text == text_of(target_tokens(fake_tokenizer().encode(PROMPT), 20, params))
    assert complete(client, seed=first["seed"], **body)["choices"][0]["text"] == text


def test_a_top_k_of_minus_one_is_off(client: httpx.Client) -> None:
    """As in vLLM; anything below is refused. Sessions take it, too."""
    off, none = (complete(client, temperature=1.0, seed=3, max_tokens=12, top_k=top_k) for top_k in (-1, 0))
    assert off["choices"] == none["choices"]
    for value, status in ((-1, 200), (-2, 400)):
        for path in ("/v1/sessions", "/v1/completions"):
            assert client.post(path, json={"prompt": [1, 2], "top_k": value, "max_tokens": 2}).status_code == status


def test_unknown_fields_and_nulls_are_ignored(client: httpx.Client) -> None:
    """Fields that ask for the default do not change the answer."""
    neutral = {
        **dict.fromkeys(("logprobs", "suffix", "stop", "top_p", "ignore_eos", "stream_options")),
        **{"user": "someone", "n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0.0},
        **{"frequency_penalty": 0, "stream": False, "service_tier": "auto", "model": "fake", "top_logprobs": 0},
        **{"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "repetition_penalty": 1.0},
    }
    assert complete(client, **neutral)["choices"] == complete(client, ignore_eos=False)["choices"]


def test_a_text_follows_the_grammar_that_was_asked_for(client: httpx.Client) -> None:
    """Through the API, also of chat, and the same with a seed."""
    fields = {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}, "seed": 3, "max_tokens": 40}
    first, again = (client.post("/v1/completions", json={"prompt": PROMPT} | fields).json() for _ in range(2))
    (choice,) = first["choices"]
    assert re.fullmatch("[ab]{3}-[0-9]{2}", choice["text"]) and choice["finish_reason"] == "stop"
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b'{"prompt":"a","temperature":NaN}', 400, "invalid_parameter", "temperature"),
        (b'{"prompt":"a","temperature":101}', 400, "invalid_parameter", "temperature"),
        (b'{"prompt":"a","top_p":2}', 400, "invalid_parameter", "top_p"),
        (b'{"prompt":"a","max_tokens":0}', 400, "invalid_parameter", "max_tokens"),
        (b'{"prompt":"a","seed":-1}', 400, "invalid_parameter", "seed"),
        (b'{"prompt":"a","n":true}', 400, "invalid_parameter", "n"),
        (b'{"prompt":"a","n":129}', 400, "invalid_parameter", "n"),
        (b'{"prompt":["a","b"],"n":65}', 400, "invalid_parameter", "n"),
        (b'{"prompt":"a","best_of":0}', 400, "invalid_parameter", "best_of"),
        (b'{"prompt":"a","best_of":2,"stream":true}', 400, "invalid_parameter", "best_of"),
        (b'{"prompt":"a","logprobs":true}', 400, "invalid_parameter", "logprobs"),
        (b'{"prompt":"a","logprobs":21}', 400, "invalid_parameter", "logprobs"),
        (b'{"prompt":"a","suffix":0}', 400, "invalid_parameter", "suffix"),
        (b'{"prompt":"a","echo":true,"logprobs":1}', 400, "unsupported_parameter", "echo"),
        (b'{"prompt":"a","prediction":"b"}', 400, "invalid_parameter", "prediction"),
        (b'{"prompt":""}', 400, "empty_prompt", None),
        (b'{"prompt":[300]}', 400, "token_out_of_range", "prompt"),
        (b'{"prompt":"a","stop_token_ids":[300]}', 400, "token_out_of_range", "stop_token_ids"),
        (b'{"prompt":[%s]}' % b",".join([b"1"] * 4096), 400, "context_length_exceeded", None),
        (b'{"prompt":"a","model":"gpt-4"}', 404, "model_not_found", "model"),
        (b'{"prompt":', 400, "malformed_json", None),
        # What would change the output is never silently dropped.
        ({"suffix": "end"}, 400, "unsupported_parameter", "suffix"),
        ({"tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools"),
        ({"top_logprobs": 2}, 400, "unsupported_parameter", "top_logprobs"),  # of chats only
        ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
        ({"function_call": {"name": "f"}}, 400, "unsupported_parameter", "function_call"),
        ({"max_completion_tokens": 5}, 400, "unsupported_parameter", "max_completion_tokens"),
        ({"prompt_logprobs": 0}, 400, "unsupported_parameter", "prompt_logprobs"),
        ({"response_format": {"type": "structural_tag"}}, 400, "unsupported_parameter", "response_format"),
        ({"guided_regex": "(a"}, 400, "invalid_grammar", None),
        ({"structured_outputs": {"json": "{"}}, 400, "invalid_grammar", "structured_outputs"),
    ],
)
def test_bad_requests_have_distinct_codes(
    client: httpx.Client, body: bytes | dict[str, Any], status: int, code: str, param: str | None
) -> None:
    """Each has the status and the code that client libraries read, and the name of the field."""
    content = body if isinstance(body, bytes) else json.dumps({"prompt": PROMPT} | body)
    assert refusal(client.post("/v1/completions", content=content, headers=JSON)) == (status, code, param)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"tokenizer": "0" * 64}, 409, "tokenizer_mismatch"),
        ({"messages": []}, 400, "invalid_parameter"),
        ({"truncate_prompt_tokens": -2}, 400, "invalid_parameter"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, 400, "context_length_exceeded"),
    ],
)
def test_a_conversation_that_cannot_be_rendered(
    client: httpx.Client, fields: dict[str, Any], status: int, code: str
) -> None:
    """Another tokenizer, no message, more text than the context holds."""
    answer = client.post("/v1/render", json={"messages": [{"role": "user", "content": "x"}]} | fields)
    assert code_of(answer) == (status, code)


def test_a_refused_prompt_ends_the_whole_call(client: httpx.Client, server: FakeServer) -> None:
    """When the second prompt of a call is refused, the first ends and frees its slot."""
    assert client.post("/v1/completions", json={"prompt": [[1, 2], [300]], "max_tokens": 4000}).status_code == 400
    server.wait_until(server.is_empty)


def test_models_are_listed_and_found_by_name(client: httpx.Client, server: FakeServer) -> None:
    """As OpenAI's clients read them. A name may hold slashes: as written, and escaped, which clients do."""
    (card,) = openai_answers.ModelList.model_validate_json(client.get("/v1/models").content).data
    assert (card.id, card.max_model_len) == ("fake", 4096)
    assert openai_answers.ModelCard.model_validate_json(client.get("/v1/models/fake").content) == card
    for name in ("other", "other/fake", "fake/other", "fak%C3%A9"):
        assert refusal(client.get(f"/v1/models/{name}")) == (404, "model_not_found", "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.core, "model", dataclasses.replace(server.core.model, name="org/model-1"))
        for name in ("org/model-1", "org%2Fmodel-1"):
            assert client.get(f"/v1/models/{name}").json()["id"] == "org/model-1"


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "zip"}, {"type": "text", "text": "?"}]},
]


def test_chat_uses_the_template(client: httpx.Client, server: FakeServer) -> None:
    """The template turns messages into the prompt; no special tokens are added. A device opens its session with the
    ids that they are rendered to: the same prompt, by the target's own template.
    """
    body = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=body)
    openai_answers.ChatCompletion.model_validate_json(answer.content)
    text = text_of(expected_tokens("system: be brief\nuser: zip?\nassistant:", 20))
    (choice,) = answer.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    pieces = chunks_of(client.post("/v1/chat/completions", json=body | {"stream": True}))
    for piece in pieces:
        openai_answers.ChatChunk.model_validate(piece)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert choice["finish_reason"] == pieces[-1]["choices"][0]["finish_reason"] == "length"
    own = fake_tokenizer()
    answer = client.post("/v1/render", json={"messages": MESSAGES, "tokenizer": own.fingerprint, "model": "fake"})
    rendered = RenderAnswer.model_validate_json(answer.content)
    assert text == text_of(target_tokens(rendered.tokens, 20))
    assert (rendered.model, rendered.target) == ("fake", server.core.model.target)
    last = client.post("/v1/render", json={"messages": MESSAGES, "truncate_prompt_tokens": 3}).json()["tokens"]
    assert last == rendered.tokens[-3:]


def test_without_a_template_no_chat_is_answered_and_nothing_rendered() -> None:
    """The error names the endpoint that needs no template."""
    with serve_fake(has_chat_template=False) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert code_of(answer) == (400, "no_chat_template") and "/v1/completions" in answer.text
        rendered = client.post("/v1/render", json={"messages": [{"role": "user", "content": "x"}]})
        assert code_of(rendered) == (400, "no_chat_template")


def test_a_shutdown_ends_a_stream_with_an_error() -> None:
    """A stream that shutdown ends gets an error event; a plain call gets 503."""
    with serve_fake(gate=StepGate()) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            server.server.begin_drain(0.0)
            server.wait_until(lambda: server.core.is_draining)  # a session that was taken would wait for the gate
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            server.gate.open()
            answer.read()
    assert ErrorAnswer.model_validate(chunks_of(answer)[-1]).error.code == "shutting_down"


@given(
    tokens=st.lists(st.integers(0, 299), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.text("abdefilnorstvy (:,é東", min_size=1, max_size=3), max_size=3),
)
def test_text_does_not_depend_on_how_commits_are_cut(tokens: list[int], cuts: list[int], stops: list[str]) -> None:
    """Text, number of tokens and stop are the same however tokens arrive; no stop string is in the text."""

    def assemble(pieces: list[list[int]]) -> tuple[str, int, bool]:
        assembler = TextAssembler(fake_tokenizer().detokenizer(), TextStyle(tuple(stops)))
        text = "".join(assembler.push(piece) for piece in pieces) + assembler.finish()
        return text, assembler.num_tokens, assembler.is_stopped

    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    pieces = [tokens[start:end] for start, end in itertools.pairwise(borders)]
    text, num_tokens, is_stopped = assemble(pieces)
    assert (text, num_tokens, is_stopped) == assemble([[token] for token in tokens])
    full = text_of(tokens)
    assert full.startswith(text) and not any(stop in text for stop in stops)
    assert is_stopped == any(stop in full for stop in stops)
    assert is_stopped or (text == full and num_tokens == len(tokens))


def test_messages_that_render_to_nothing_are_refused() -> None:
    """A device took an answer without tokens for a broken server, and gave its own client 503."""
    own = fake_tokenizer(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    with refused("empty_prompt", 400, "makes no text"):
        encode_chat(own, 100, openai.RenderRequest.model_validate({"messages": [{"role": "user", "content": ""}]}))
