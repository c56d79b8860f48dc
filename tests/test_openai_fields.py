"""OpenAI's fields beside the plain ones, at the verifier and at the local endpoint: both give the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import LocalEndpoint, fake_draft, serve_local
from tests.scripted import ScriptedRuntime
from tests.serving import EOS_ID, FakeServer, fake_tokenizer, run_session, serve_fake, target_tokens

from outrider.cloud.api import sessions
from outrider.cloud.api.stream import SessionText
from outrider.cloud.engine import EngineConfig
from outrider.cloud.pending.policy import Policy
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import VerifierClient
from outrider.models.errors import RequestError
from outrider.models.http import openai, openai_answers
from outrider.models.http.answer_text import TextStyle, _StopString
from outrider.models.http.answers import best_choices, choice_seed
from outrider.models.http.encoding import fill_in_prompt
from outrider.models.http.errors import FieldError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import logprobs_of
from outrider.models.text.predicted import PredictionFollower
from outrider.models.text.tokenizer import Tokenizer

PROMPT = "def verify("
PARAMS = SamplingParams(1.0, seed=7)


def test_a_message_of_parts_is_passed_on_without_a_warning() -> None:
    """A warning, which is an error here, would show the text in the log."""
    message = {"role": "user", "content": [{"type": "text", "text": "a secret"}], "name": "b"}
    assert openai.ChatMessage.model_validate(message).model_dump(exclude_unset=True) == message


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    with serve_local(cloud.url) as running:
        yield running


@pytest.fixture(scope="module", params=["endpoint", "verifier"])
def client(request: pytest.FixtureRequest, cloud: FakeServer, local: LocalEndpoint) -> Iterator[httpx.Client]:
    url = local.url if request.param == "endpoint" else cloud.url
    with httpx.Client(base_url=url, timeout=30.0) as opened:
        yield opened


def complete(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True} | fields
    if path == "/v1/completions":
        whole = {"prompt": PROMPT} | whole
    answer = client.post(path, json=whole)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chunks(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True, "stream": True}
    if path == "/v1/completions":
        whole = {"prompt": PROMPT} | whole
    answer = client.post(path, json=whole | fields)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]", answer.text
    return [json.loads(line) for line in lines]


def refused(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> tuple[str, str | None]:
    whole: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = client.post(path, json=whole | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"]


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "zip"}]
CHAT_PROMPT = "user: zip\nassistant:"


# logprobs


def expected_logprobs(prompt: str, count: int, num_top: int) -> list[Any]:
    """Token by token, from the model's own rows."""
    ids = fake_tokenizer().encode(prompt)
    target, found = FakeSequenceRuntime(vocab_size=fake_tokenizer().size), []
    row = target.extend(ids)
    for token in target_tokens(ids, count, PARAMS):
        found.append(logprobs_of(row, token, num_top))
        row = target.extend([token])
    return found


def test_logprobs_of_a_completion(client: httpx.Client) -> None:
    """As OpenAI types them: the model's own at temperature 1, whatever the request's; offsets are places in it."""
    (choice,) = complete(client, logprobs=3)["choices"]
    found = choice["logprobs"]
    openai_answers.CompletionLogprobs.model_validate(found, strict=True)
    expected = expected_logprobs(PROMPT, 24, 3)
    assert found["token_logprobs"] == pytest.approx([each.logprob for each in expected])
    spelled = [fake_tokenizer().token_bytes(each.token) for each in expected]
    assert b"".join(spelled).decode(errors="replace") == choice["text"]
    for each, before, token, text, top, offset in zip(
        expected,
        [b"", *spelled[:-1]],
        spelled,
        found["tokens"],
        found["top_logprobs"],
        found["text_offset"],
        strict=True,
    ):
        assert text == token.decode() if token.isascii() else text.startswith("bytes:\\x")
        assert top[text] == pytest.approx(each.logprob) and 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(each.top[0][1])
        if (before + token).isascii():
            assert choice["text"][offset : offset + len(text)] == text
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(client, logprobs=3)]
    for name, values in found.items():
        assert [value for piece in pieces for value in piece[name]] == values
    (only,) = complete(client, logprobs=0)["choices"]
    assert [list(top) for top in only["logprobs"]["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_logprobs_of_a_chat(client: httpx.Client) -> None:
    """Each token with its bytes, which may be half a character; streamed they are the same."""
    (choice,) = complete(client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)["choices"]
    openai_answers.ChatLogprobs.model_validate(choice["logprobs"], strict=True)
    found, expected = choice["logprobs"]["content"], expected_logprobs(CHAT_PROMPT, 24, 2)
    assert (
        bytes(byte for each in found for byte in each["bytes"]).decode(errors="replace") == choice["message"]["content"]
    )
    for each, known in zip(found, expected, strict=True):
        assert each["logprob"] == pytest.approx(known.logprob)
        tokens = [fake_tokenizer().token_bytes(token) for token, _ in known.top]
        assert [bytes(top["bytes"]) for top in each["top_logprobs"]] == tokens
    streamed = chunks(client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [each for piece in pieces if piece for each in piece["content"]] == found
    (bare,) = complete(client, CHAT, messages=MESSAGES, logprobs=True)["choices"]
    assert [each["top_logprobs"] for each in bare["logprobs"]["content"]] == [[]] * 24
    assert refused(client, CHAT, top_logprobs=2) == ("invalid_parameter", "top_logprobs")


def test_logprobs_end_where_the_text_does(client: httpx.Client) -> None:
    """The tokens after a stop string's beginning are left out, and so is the end token."""
    text = complete(client)["choices"][0]["text"]
    stop = text[9:12]
    (choice,) = complete(client, logprobs=1, stop=stop)["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets[-1] < len(choice["text"])


# n, best_of, echo, suffix


def test_each_choice_has_a_seed_of_its_own(client: httpx.Client) -> None:
    """Choice i of each prompt is the text of `choice_seed(seed, i)`; the first is that of a call without n."""
    prompts = [PROMPT, "zip"]
    alone = [
        complete(client, prompt=prompt, seed=choice_seed(7, index))["choices"][0]["text"]
        for prompt in prompts
        for index in range(3)
    ]
    whole = complete(client, prompt=prompts, n=3)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == alone and len(set(alone)) == 6
    assert whole["seed"] == choice_seed(7, 0) == 7
    texts = [""] * 6
    for chunk in chunks(client, prompt=prompts, n=3):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == alone
    num_prompt = sum(len(fake_tokenizer().encode(prompt)) for prompt in prompts)
    assert whole["usage"]["prompt_tokens"] == num_prompt and whole["usage"]["completion_tokens"] == 6 * 24


def test_choices_of_a_chat(client: httpx.Client) -> None:
    """Each with its message, and in a stream with its role."""
    whole = complete(client, CHAT, messages=MESSAGES, n=2)
    expected = [
        complete(client, CHAT, messages=MESSAGES, seed=choice_seed(7, index))["choices"][0]["message"]
        for index in range(2)
    ]
    assert [choice["message"] for choice in whole["choices"]] == expected
    streamed = chunks(client, CHAT, messages=MESSAGES, n=2)
    for index in range(2):
        deltas = [each["choices"][0]["delta"] for each in streamed if each["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == expected[index]["content"]


def test_the_prompt_runs_once_for_all_its_choices(cloud: FakeServer) -> None:
    """The others begin when it is in the cache."""
    prompt = [(7 * index) % 290 + 1 for index in range(160)]
    with httpx.Client(base_url=cloud.url) as client:
        before = cloud.core.engine.stats().totals.prefix_hit_tokens
        complete(client, prompt=prompt, n=4, max_tokens=4)
        assert cloud.core.engine.stats().totals.prefix_hit_tokens - before >= 3 * 144
        cloud.wait_until(cloud.is_empty)


def test_the_best_of_several(client: httpx.Client) -> None:
    """By mean logprob per token, the first of equal ones; all are counted."""
    alone = [complete(client, seed=choice_seed(7, index), logprobs=0)["choices"][0] for index in range(5)]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 24 for choice in alone]
    ranked = sorted(range(5), key=lambda index: -means[index])
    whole = complete(client, best_of=5, n=2)
    assert [choice["text"] for choice in whole["choices"]] == [alone[index]["text"] for index in ranked[:2]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]
    assert whole["usage"]["completion_tokens"] == 5 * 24
    assert best_choices([0.0, -1.0, -2.0, -2.0], 2, 1) == [0, 2]


def test_echo(client: httpx.Client) -> None:
    """The text begins with the prompt: as it came, or the text of its ids."""
    text = complete(client)["choices"][0]["text"]
    assert complete(client, echo=True)["choices"][0]["text"] == PROMPT + text
    ids = fake_tokenizer().encode(PROMPT)
    assert complete(client, echo=True, prompt=ids)["choices"][0]["text"] == PROMPT + text
    streamed = chunks(client, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == PROMPT + text
    assert streamed[0]["choices"][0]["text"].startswith(PROMPT)


def test_suffix_needs_a_models_own_tokens(client: httpx.Client, tmp_path: Any) -> None:
    """It is refused by name where the model has none; else both parts stand between them."""
    assert refused(client, suffix="end") == ("unsupported_parameter", "suffix")
    assert refused(client, suffix="end", echo=True) == ("invalid_parameter", "echo")
    with pytest.raises(RequestError, match="has no tokens to fill in text"):
        fill_in_prompt(fake_tokenizer(), "a", "b")
    for names in (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        ["[SUFFIX]", "[PREFIX]"],
    ):
        tokenizer = with_tokens(tmp_path, names)
        one, two, *rest = (tokenizer.token_id(name) for name in names)
        before, after = tokenizer.encode("def f("), tokenizer.encode("return")
        if names[0] == "[SUFFIX]":
            before, after = after, before
        assert fill_in_prompt(tokenizer, "def f(", "return") == [one, *before, two, *after, *rest]


def with_tokens(root: Any, names: list[str]) -> Tokenizer:
    from tests.serving import save_fake_tokenizer
    from tokenizers import Tokenizer as Backend

    save_fake_tokenizer(root)
    backend = Backend.from_file(str(root / "tokenizer.json"))
    backend.add_special_tokens(names)
    backend.save(str(root / "tokenizer.json"))
    return Tokenizer.from_dir(root)


# stop strings, special tokens, the prompt's end


def test_what_ends_a_text_may_be_shown(client: httpx.Client) -> None:
    """`include_stop_str_in_output`: a stop string, and the text of a stop id; special ones are hidden all the same."""
    text = complete(client)["choices"][0]["text"]
    stop = text[9:12]
    end = text.index(stop)
    assert complete(client, stop=[stop])["choices"][0]["text"] == text[:end]
    assert complete(client, stop=[stop], include_stop_str_in_output=True)["choices"][0]["text"] == text[: end + 3]
    ids = target_tokens(fake_tokenizer().encode(PROMPT), 24, PARAMS)
    asked: dict[str, Any] = {"stop_token_ids": [ids[5]], "ignore_eos": False}
    assert complete(client, **asked)["choices"][0]["text"] == fake_tokenizer().decode(ids[:5])
    shown = complete(client, include_stop_str_in_output=True, **asked)["choices"][0]["text"]
    assert shown == fake_tokenizer().decode(ids[:6])


def test_special_tokens_may_be_shown(client: httpx.Client) -> None:
    """`skip_special_tokens: false`."""
    prompt, seed = "zip", 3
    ids = target_tokens(fake_tokenizer().encode(prompt), 600, SamplingParams(1.0, seed=seed))
    assert EOS_ID in ids
    count = ids.index(EOS_ID) + 2
    asked: dict[str, Any] = {"prompt": prompt, "seed": seed, "max_tokens": count}
    hidden = complete(client, **asked)["choices"][0]["text"]
    shown = complete(client, skip_special_tokens=False, **asked)["choices"][0]["text"]
    assert "<|end|>" in shown and shown.replace("<|end|>", "") == hidden


def test_a_prompts_last_tokens(client: httpx.Client) -> None:
    """`truncate_prompt_tokens`, of a prompt and of a conversation."""
    ids = fake_tokenizer().encode("zip the drafts")
    expected = complete(client, prompt=ids[-3:])
    found = complete(client, prompt="zip the drafts", truncate_prompt_tokens=3)
    assert found["choices"] == expected["choices"] and found["usage"]["prompt_tokens"] == 3
    chat = complete(client, CHAT, messages=MESSAGES, truncate_prompt_tokens=4)
    assert chat["usage"]["prompt_tokens"] == 4
    assert complete(client, truncate_prompt_tokens=-1)["choices"] == complete(client)["choices"]


def test_usage_in_each_chunk(client: httpx.Client) -> None:
    """`continuous_usage_stats` beside `include_usage`: it never falls."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    streamed = chunks(client, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed]
    assert counts == sorted(counts) and 0 < counts[0] <= counts[-1] == 24 and streamed[-1]["choices"] == []


# stop strings in sessions


def session_stop(prompt: list[int], tokens: list[int], stop: str) -> tuple[int, int]:
    """Tokens up to the one that completes the stop string, and the characters before it, one token at a time."""
    for count in range(1, len(tokens) + 1):
        text = fake_tokenizer().detokenizer(context=prompt).push(tokens[:count])
        if stop in text:
            return count, text.index(stop)
    raise AssertionError("the text does not have it")


def test_a_session_ends_at_a_stop_string(cloud: FakeServer) -> None:
    """The commits end with the token that completes it, across tokens, drafted or not; the end says where."""
    ids = fake_tokenizer().encode(PROMPT)
    tokens = target_tokens(ids, 40, PARAMS)
    text = fake_tokenizer().decode(tokens)
    with httpx.Client(base_url=cloud.url) as client:
        for begin, length in ((6, 1), (9, 3), (14, 7)):
            stop = text[begin : begin + length]
            count, chars = session_stop(ids, tokens, stop)
            body: dict[str, Any] = {"prompt": ids, "max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}
            found = run_session(client, body | {"stop": ["never there", stop]})
            assert found.tokens == tokens[:count] and found.end.reason == "stop"
            assert found.end.cut is not None and found.end.usage.completion_tokens == count
            assert (found.end.cut.tokens, found.end.cut.chars, found.end.cut.stop) == (count, chars, stop)
            # One that went on with the text from any place: also from inside the stop string, and from behind it.
            for done in (count - 1, count):
                rest = {"prompt": ids + tokens[:done], "generated": done, "max_tokens": 40 - done, "stop": [stop]}
                again = run_session(client, body | rest)
                assert again.tokens == tokens[done:count] and again.end.reason == "stop"
                assert again.end.cut is not None and again.end.cut.chars == chars
        assert fake_tokenizer().decode(ids).endswith("(")  # in the prompt it is no part of the text
        whole = run_session(client, body | {"stop": [PROMPT]})
        assert whole.tokens == tokens and whole.end.reason == "length" and whole.end.cut is None
        cloud.wait_until(cloud.is_empty)
        answer = client.post("/v1/sessions", json=body | {"generated": len(ids) + 1})
        assert answer.json()["error"]["param"] == "generated"


def test_the_devices_text_ends_with_the_session(
    cloud: FakeServer, local: LocalEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides cut at the same character; where special tokens are shown, only the device can know where."""
    made: list[SessionText] = []

    class Kept(SessionText):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sessions, "SessionText", Kept)
    with httpx.Client(base_url=local.url) as client:
        text = complete(client, max_tokens=60)["choices"][0]["text"]
        stop = text[20:24]
        found = complete(client, max_tokens=60, stop=stop)
        assert found["choices"][0]["text"] == text[: text.index(stop)]
        (server,) = made
        cloud.wait_until(cloud.is_empty)
        assert server.cut is not None and server.cut.chars == text.index(stop)
        assert server.cut.tokens == found["usage"]["completion_tokens"]
        shown = complete(client, max_tokens=60, stop=stop, skip_special_tokens=False)
        assert shown["choices"] == found["choices"] and len(made) == 1


def test_an_agent_learns_where_a_stop_string_ends_its_text(cloud: FakeServer) -> None:
    """Also after a lost connection, inside the stop string; an older server is asked without it."""
    ids = fake_tokenizer().encode(PROMPT)
    tokens = target_tokens(ids, 40, PARAMS)
    stop = fake_tokenizer().decode(tokens)[14:21]
    count, chars = session_stop(ids, tokens, stop)
    request = GenerationRequest(tuple(ids), PARAMS, 40, ignore_eos=True, stop=(stop,))

    async def run(asked: GenerationRequest) -> GenerationResult:
        async with VerifierClient(cloud.url) as client:
            return await StreamAgent(Endpoints([client])).generate(asked)

    found = asyncio.run(run(request))
    assert found.tokens == tuple(tokens[:count]) and found.finish_reason == "stop"
    assert found.cut is not None and (found.cut.tokens, found.cut.chars) == (count, chars)
    done = count - 1
    rest = replace(request, prompt=(*ids, *tokens[:done]), num_generated=done, max_tokens=40 - done)
    again = asyncio.run(run(rest))
    assert again.tokens == (tokens[done],) and again.cut is not None and again.cut.chars == chars
    with pytest.MonkeyPatch.context() as patch:
        parse = cloud.core.bodies.parse

        async def as_older(owner: bytes, message: Any, body: bytes, **more: Any) -> Any:
            if b'"stop":' in body or b'"prediction":' in body:
                raise FieldError("invalid_parameter", "stop: Extra inputs are not permitted", param="stop")
            return await parse(owner, message, body, **more)

        patch.setattr(cloud.core.bodies, "parse", as_older)
        old = asyncio.run(run(replace(request, prediction=(1, 2))))
    assert old.tokens == tuple(tokens) and old.cut is None


# predicted outputs


@pytest.mark.parametrize("is_local", [False, True])
def test_a_predicted_output_is_drafted_from(is_local: bool) -> None:
    """The text is the same, in fewer passes; usage counts the prediction's tokens by whether the text has them."""
    sure = EngineConfig(policy=Policy.VERIFY, looks_up=False)  # times of this machine decide nothing
    written = "def check(tokens, drafts): return all(token == draft for token, draft in zip(tokens, drafts))"
    predicted = written.replace("all(", "any(")
    runtime = ScriptedRuntime(written, PROMPT)
    with serve_fake(config=sure, runtime=runtime) as cloud, serve_local(cloud.url, runtime=fake_draft(0.0)) as local:
        stats = cloud.core.engine.stats
        with httpx.Client(base_url=local.url if is_local else cloud.url) as client:
            asked: dict[str, Any] = {"max_tokens": 90, "ignore_eos": False, "temperature": 0}
            plain = complete(client, **asked)
            assert plain["choices"][0]["text"] == written and stats().totals.lookup_accepted == 0
            passes = stats().totals.passes
            tokens = fake_tokenizer().encode(predicted)
            follower = PredictionFollower(tokens)
            follower.push(fake_tokenizer().encode(written))
            found = complete(client, prediction={"type": "content", "content": predicted}, **asked)
            assert found["choices"] == plain["choices"]
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == follower.num_accepted > 0.8 * len(tokens)
            assert details["rejected_prediction_tokens"] == len(tokens) - follower.num_accepted > 0
            assert stats().totals.lookup_accepted > 10 and stats().totals.passes - passes < passes / 2
            parts = [{"type": "text", "text": predicted[:10]}, {"type": "text", "text": predicted[10:]}]
            again = complete(client, prediction={"type": "content", "content": parts}, **asked)
            assert again["usage"]["completion_tokens_details"] == details
            predicting = {"prediction": {"type": "content", "content": predicted}}
            check_acceptance(client, asked | predicting, found["metrics"]["speculative_decoding"], len(tokens))


def check_acceptance(client: httpx.Client, asked: dict[str, Any], found: dict[str, Any], num_predicted: int) -> None:
    """What an answer says of its drafts, by vLLM's names; a stream says it with its usage, several texts do not."""
    steps, accepted = found["num_spec_steps"], found["num_accepted_draft_tokens"]
    assert 0 < steps == sum(found["acceptance_histogram"]) and found["num_spec_tokens"] > 1
    assert accepted == sum(count * each for count, each in enumerate(found["acceptance_histogram"]))
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1
    assert num_predicted * 0.5 < accepted <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + accepted / steps
    assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}} | asked
    events = client.post("/v1/completions", json=body).text.split("\n\n")
    *others, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert last["metrics"]["speculative_decoding"].keys() == found.keys() and last["usage"]["completion_tokens"] > 10
    assert not any("metrics" in other for other in others)
    assert "metrics" not in complete(client, n=2, **asked)


def test_a_prediction_is_bounded(client: httpx.Client) -> None:
    """By its characters before it is tokenized, then by its tokens."""
    for text in ("zip " * 20_000, "é" * 500_000):
        assert refused(client, prediction={"type": "content", "content": text}) == ("invalid_parameter", "prediction")


def test_a_prediction_is_found_again_after_a_difference() -> None:
    """Each token counts once, and `rest` is what a resumed session is told."""
    follower = PredictionFollower([1, 2, 3, 4, 5, 6, 7, 8])
    follower.push([1, 2, 9, 9, 4, 5, 6])
    assert (follower.num_accepted, follower.num_rejected, follower.rest) == (5, 3, (7, 8))
    follower.push([7, 8, 1, 2, 3, 4])
    assert (follower.num_accepted, follower.num_rejected) == (8, 0)
    empty = PredictionFollower([])
    empty.push([1])
    assert (empty.num_accepted, empty.num_rejected, empty.rest) == (0, 0, ())
    assert TextStyle(skips_special=False).is_plain is False


# tools and reasoning, from a target that writes them

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    "assistant: {% if thinks %}<think>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
WRITTEN = '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller() -> Iterator[tuple[str, str]]:
    """A verifier whose target writes a call, and an endpoint before it."""
    template = TOOL_TEMPLATE + "{# </think> #}"
    runtime = ScriptedRuntime(WRITTEN, "assistant: ")
    with serve_fake(runtime=runtime, chat_template=template) as server, serve_local(server.url) as endpoint:
        yield server.url, endpoint.url


@pytest.mark.parametrize("place", [0, 1], ids=["verifier", "endpoint"])
def test_a_call_of_a_tool(caller: tuple[str, str], place: int) -> None:
    """In message and deltas, with the reasoning beside it; without tools the text is content."""
    with httpx.Client(base_url=caller[place], timeout=30.0) as client:
        asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "ignore_eos": False}
        whole = complete(client, CHAT, tools=TOOLS, **asked)
        openai_answers.ChatCompletion.model_validate(whole, strict=True)
        (choice,) = whole["choices"]
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'} and call["type"] == "function"
        assert (message["content"], message["reasoning_content"]) == ("Sure.", "Hm.")
        assert choice["finish_reason"] == "tool_calls" and call["id"].startswith("call_")
        content = thought = arguments = ""
        reasons = []
        for chunk in chunks(client, CHAT, tools=TOOLS, **asked):
            openai_answers.ChatChunk.model_validate(chunk, strict=True)
            delta = chunk["choices"][0]["delta"]
            content += delta.get("content", "")
            thought += delta.get("reasoning_content", "")
            arguments += "".join(each["function"]["arguments"] for each in delta.get("tool_calls", ()))
            reasons.append(chunk["choices"][0]["finish_reason"])
        assert (content, thought, arguments) == ("Sure.", "Hm.", '{"city": "Paris"}')
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = complete(client, CHAT, **asked, **fields)["choices"]
            assert "tool_calls" not in choice["message"] and choice["message"]["content"].endswith("</tool_call>")
            assert choice["finish_reason"] == "stop"
        (choice,) = complete(client, CHAT, include_reasoning=False, **asked)["choices"]
        assert "reasoning_content" not in choice["message"] and choice["message"]["content"].startswith("Sure.")


@pytest.mark.parametrize("place", [0, 1], ids=["verifier", "endpoint"])
def test_a_choice_of_tools_is_checked(caller: tuple[str, str], place: int) -> None:
    """The schema of tools, and what may be chosen."""
    with httpx.Client(base_url=caller[place], timeout=30.0) as client:
        named = {"type": "function", "function": {"name": "other"}}
        for fields, param in (
            ({"tools": TOOLS, "tool_choice": named}, "tool_choice"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
            ({"tools": [{"type": "custom"}]}, "tools.0.type"),
            ({"tools": TOOLS * 129}, "tools"),
        ):
            assert refused(client, CHAT, **fields) == ("invalid_parameter", param), fields


def test_the_responses_api_is_refused_by_name(client: httpx.Client) -> None:
    """With the endpoint that does the same work."""
    answer = client.post("/v1/responses", json={"model": "fake", "input": "zip"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert "/v1/chat/completions" in error["message"]


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
)
def test_stop_strings_are_found_as_by_searching(pieces: list[str], stops: list[str]) -> None:
    """The one that begins first, of those that a token completes; what may begin one is held back, and no more."""
    found = [_StopString(stop) for stop in stops]
    text = ""
    for piece in pieces:
        text += piece
        ends = [each.push(piece) for each in found]
        assert [end is not None for end in ends] == [stop in text for stop in stops]
        for end, stop in zip(ends, stops, strict=True):
            if end is not None:
                assert len(text) - len(piece) + end == text.index(stop) + len(stop)
        if any(stop in text for stop in stops):
            return
        for each, stop in zip(found, stops, strict=True):
            assert each.num_matched == max(n for n in range(len(stop)) if text.endswith(stop[:n]))


def test_stop_strings_cost_little_whatever_the_text_is() -> None:
    """16 of 1,000 characters that nearly match all the time: work per character is bounded."""
    stop = _StopString("a" * 999 + "c")
    steps = 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    stop._shorter = Counted([0])
    for _ in range(20):
        stop.push("a" * 998 + "b")
    assert steps < 3 * 20 * 999
