"""OpenAI's fields beside the plain ones, at the verifier and at the local endpoint: both give the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import LocalEndpoint, chunks_of
from tests.serving import EOS_ID, FakeServer, fake_tokenizer, save_fake_tokenizer, target_tokens
from tokenizers import Tokenizer as Backend

from outrider.models.errors import RequestError
from outrider.models.http import openai, openai_answers
from outrider.models.http.answer_text import TextStyle, TokenPiece, _StopString
from outrider.models.http.answers import best_choices, choice_seed
from outrider.models.http.encoding import fill_in_prompt
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs, logprobs_of
from outrider.models.text.tokenizer import Tokenizer

PROMPT = "def verify("
PARAMS = SamplingParams(1.0, seed=7)


def test_a_message_of_parts_is_passed_on_without_a_warning() -> None:
    """A warning, which is an error here, would show the text in the log."""
    message = {"role": "user", "content": [{"type": "text", "text": "a secret"}], "name": "b"}
    assert openai.ChatMessage.model_validate(message).model_dump(exclude_unset=True) == message


@pytest.mark.parametrize("fields", [{"temperature": 1e-8}, {"temperature": 9e-5}, {"top_p": 0}, {"top_p": 0.0}])
@pytest.mark.parametrize("kind", [openai.CompletionRequest, openai.ChatRequest])
def test_what_keeps_the_best_token_only_is_greedy(kind: type[openai.ChatRequest], fields: dict[str, float]) -> None:
    """OpenAI's ranges begin at 0; our sampler's do not."""
    asked = {"prompt": "a", "messages": MESSAGES, "seed": 7, **fields}
    assert kind.model_validate(asked).sampling() == SamplingParams(0.0, seed=7)


@pytest.fixture(scope="module", params=["endpoint", "verifier"])
def client(request: pytest.FixtureRequest, cloud: FakeServer, local: LocalEndpoint) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=local.url if request.param == "endpoint" else cloud.url, timeout=30.0) as opened:
        yield opened


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    own = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    return own | {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True} | fields


def complete(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> Any:
    answer = client.post(path, json=asked(path, fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(client: httpx.Client, **fields: Any) -> str:
    return str(complete(client, **fields)["choices"][0]["text"])


def chunks(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    return chunks_of(client.post(path, json=asked(path, {"stream": True, **fields})))


def refused(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> tuple[str, str | None]:
    answer = client.post(path, json=asked(path, fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"]


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "zip"}]


# logprobs


def expected_logprobs(prompt: str, count: int, num_top: int) -> list[Any]:
    """Token by token, from the model's own rows."""
    ids, target = fake_tokenizer().encode(prompt), FakeSequenceRuntime(vocab_size=fake_tokenizer().size)
    tokens = target_tokens(ids, count, PARAMS)
    rows = [target.extend(ids), *(target.extend([token]) for token in tokens[:-1])]
    return [logprobs_of(row, token, num_top) for row, token in zip(rows, tokens, strict=True)]


def test_logprobs_of_a_completion(client: httpx.Client) -> None:
    """As OpenAI types them: the model's own at temperature 1, whatever the request's; offsets are places in it."""
    (choice,) = complete(client, logprobs=3)["choices"]
    found = choice["logprobs"]
    openai_answers.CompletionLogprobs.model_validate(found, strict=True)
    expected = expected_logprobs(PROMPT, 24, 3)
    assert found["token_logprobs"] == pytest.approx([each.logprob for each in expected])
    spelled = [fake_tokenizer().token_bytes(each.token) for each in expected]
    assert b"".join(spelled).decode(errors="replace") == choice["text"]
    shown = (found[name] for name in ("tokens", "top_logprobs", "text_offset"))
    for each, before, token, text, top, offset in zip(expected, [b"", *spelled[:-1]], spelled, *shown, strict=True):
        assert text == token.decode() if token.isascii() else text.startswith("bytes:\\x")
        assert top[text] == pytest.approx(each.logprob) and 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(each.top[0][1])
        assert choice["text"][offset : offset + len(text)] == text or not (before + token).isascii()
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(client, logprobs=3)]
    for name, values in found.items():
        assert [value for piece in pieces for value in piece[name]] == values
    (only,) = complete(client, logprobs=0)["choices"]
    assert [list(top) for top in only["logprobs"]["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_logprobs_of_a_chat(client: httpx.Client) -> None:
    """Each token with its bytes, which may be half a character; streamed they are the same."""
    (choice,) = complete(client, CHAT, logprobs=True, top_logprobs=2)["choices"]
    openai_answers.ChatLogprobs.model_validate(choice["logprobs"], strict=True)
    found, expected = choice["logprobs"]["content"], expected_logprobs("user: zip\nassistant:", 24, 2)
    assert (
        bytes(byte for each in found for byte in each["bytes"]).decode(errors="replace") == choice["message"]["content"]
    )
    for each, known in zip(found, expected, strict=True):
        assert each["logprob"] == pytest.approx(known.logprob)
        tokens = [fake_tokenizer().token_bytes(token) for token, _ in known.top]
        assert [bytes(top["bytes"]) for top in each["top_logprobs"]] == tokens
    streamed = chunks(client, CHAT, logprobs=True, top_logprobs=2)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [each for piece in pieces if piece for each in piece["content"]] == found
    (bare,) = complete(client, CHAT, logprobs=True)["choices"]
    assert [each["top_logprobs"] for each in bare["logprobs"]["content"]] == [[]] * 24
    assert refused(client, CHAT, top_logprobs=2) == ("invalid_parameter", "top_logprobs")


# n, best_of, echo, suffix


def test_each_choice_has_a_seed_of_its_own(client: httpx.Client) -> None:
    """Choice i of each prompt is the text of `choice_seed(seed, i)`; the first is that of a call without n."""
    prompts = [PROMPT, "zip"]
    alone = [text_of(client, prompt=prompt, seed=choice_seed(7, index)) for prompt in prompts for index in range(3)]
    whole = complete(client, prompt=prompts, n=3)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(alone))
    assert len(set(alone)) == 6 and whole["seed"] == choice_seed(7, 0) == 7
    texts = [""] * 6
    for chunk in chunks(client, prompt=prompts, n=3):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    num_prompt = sum(len(fake_tokenizer().encode(prompt)) for prompt in prompts)
    assert texts == alone
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (num_prompt, 6 * 24)


def test_choices_of_a_chat(client: httpx.Client) -> None:
    """Each with its message, and in a stream with its role."""
    alone = [complete(client, CHAT, seed=choice_seed(7, index))["choices"][0]["message"] for index in range(2)]
    assert [choice["message"] for choice in complete(client, CHAT, n=2)["choices"]] == alone
    choices = [each["choices"][0] for each in chunks(client, CHAT, n=2)]
    for index, message in enumerate(alone):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        content = "".join(delta.get("content", "") for delta in deltas)
        assert (deltas[0]["role"], content) == ("assistant", message["content"])


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
    found = [(choice["text"], choice["index"], choice["logprobs"]) for choice in whole["choices"]]
    assert found == [(alone[index]["text"], place, None) for place, index in enumerate(ranked[:2])]
    assert whole["usage"]["completion_tokens"] == 5 * 24
    assert best_choices([0.0, -1.0, -2.0, -2.0], 2, 1) == [0, 2]


def test_echo(client: httpx.Client) -> None:
    """The text begins with the prompt: as it came, or the text of its ids."""
    expected = PROMPT + text_of(client)
    for prompt in (PROMPT, fake_tokenizer().encode(PROMPT)):
        assert text_of(client, echo=True, prompt=prompt) == expected
    pieces = [chunk["choices"][0]["text"] for chunk in chunks(client, echo=True)]
    assert "".join(pieces) == expected and pieces[0].startswith(PROMPT)


def test_suffix_needs_a_models_own_tokens(client: httpx.Client, tmp_path: Any) -> None:
    """It is refused by name where the model has none; else both parts stand between them."""
    assert refused(client, suffix="end") == ("unsupported_parameter", "suffix")
    assert refused(client, suffix="end", echo=True) == ("invalid_parameter", "echo")
    with pytest.raises(RequestError, match="this model has no tokens to fill in text"):
        fill_in_prompt(fake_tokenizer(), "a", "b")
    for names in (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], ["[SUFFIX]", "[PREFIX]"]):
        tokenizer = with_tokens(tmp_path, names)
        one, two, *rest = (tokenizer.token_id(name) for name in names)
        before, after = tokenizer.encode("def f("), tokenizer.encode("return")
        if names[0] == "[SUFFIX]":
            before, after = after, before
        assert fill_in_prompt(tokenizer, "def f(", "return") == [one, *before, two, *after, *rest]


def with_tokens(root: Any, names: list[str]) -> Tokenizer:
    save_fake_tokenizer(root)
    backend = Backend.from_file(str(root / "tokenizer.json"))
    backend.add_special_tokens(names)
    backend.save(str(root / "tokenizer.json"))
    return Tokenizer.from_dir(root)


# stop strings, special tokens, the prompt's end


def test_what_ends_a_text_may_be_shown(client: httpx.Client) -> None:
    """`include_stop_str_in_output`: a stop string, and the text of a stop id; special ones are hidden all the same.
    Logprobs end where the text does: those after a stop string's beginning are left out.
    """
    text = text_of(client)
    stop = text[9:12]
    end = text.index(stop)
    (choice,) = complete(client, logprobs=1, stop=stop)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert (choice["text"], choice["finish_reason"], offsets[0]) == (text[:end], "stop", 0) and offsets[-1] < end
    assert text_of(client, stop=[stop], include_stop_str_in_output=True) == text[: end + 3]
    ids = target_tokens(fake_tokenizer().encode(PROMPT), 24, PARAMS)
    asked: dict[str, Any] = {"stop_token_ids": [ids[5]], "ignore_eos": False}
    assert text_of(client, **asked) == fake_tokenizer().decode(ids[:5])
    assert text_of(client, include_stop_str_in_output=True, **asked) == fake_tokenizer().decode(ids[:6])
    # The model's own end is an end beside `ignore_eos` where a request names it.
    asked = {"stop_token_ids": [EOS_ID], "logit_bias": {str(EOS_ID): 100}, "skip_special_tokens": False, "logprobs": 0}
    (choice,) = complete(client, **asked)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("", [], "stop")


def test_special_tokens_may_be_shown(client: httpx.Client) -> None:
    """`skip_special_tokens: false`."""
    prompt, seed = "zip", 3
    ids = target_tokens(fake_tokenizer().encode(prompt), 600, SamplingParams(1.0, seed=seed))
    assert EOS_ID in ids
    asked: dict[str, Any] = {"prompt": prompt, "seed": seed, "max_tokens": ids.index(EOS_ID) + 2}
    shown = text_of(client, skip_special_tokens=False, **asked)
    assert "<|end|>" in shown and shown.replace("<|end|>", "") == text_of(client, **asked)


def test_a_prompts_last_tokens(client: httpx.Client) -> None:
    """`truncate_prompt_tokens`, of a prompt and of a conversation."""
    expected = complete(client, prompt=fake_tokenizer().encode("zip the drafts")[-3:])
    found = complete(client, prompt="zip the drafts", truncate_prompt_tokens=3)
    assert found["choices"] == expected["choices"] and found["usage"]["prompt_tokens"] == 3
    # More than the context holds, by far, as their first part says.
    long = {"messages": [{"role": "user", "content": "verify " * 3500 + "東" * 3000}]}
    for fields in ({}, long):
        assert complete(client, CHAT, truncate_prompt_tokens=4, **fields)["usage"]["prompt_tokens"] == 4
    assert refused(client, CHAT, **long)[0] == "context_length_exceeded"
    assert complete(client, truncate_prompt_tokens=-1)["choices"] == complete(client)["choices"]


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [9999]}, {"logit_bias": {"9999": 1}}, {"allowed_token_ids": [1, 9999]}, {"prompt": [9999]}],
)
def test_an_id_beyond_the_vocabulary_is_refused_before_the_text_begins(
    client: httpx.Client, fields: dict[str, Any]
) -> None:
    """By the name that the request gives it; a session's is another, and no stream begins with 200."""
    assert refused(client, stream=True, **fields) == ("token_out_of_range", next(iter(fields)))


def test_usage_in_each_chunk(client: httpx.Client) -> None:
    """`continuous_usage_stats` beside `include_usage`: it never falls."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    streamed = chunks(client, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed]
    assert counts == sorted(counts) and 0 < counts[0] <= counts[-1] == 24 and streamed[-1]["choices"] == []


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
)
def test_stop_strings_are_found_as_by_searching(pieces: list[str], stops: list[str]) -> None:
    """The one that begins first, of those that a token completes; what may begin one is held back, and no more."""
    found, text = [_StopString(stop) for stop in stops], ""
    for piece in pieces:
        text += piece
        ends = [each.push(piece) for each in found]
        assert [end is not None for end in ends] == [stop in text for stop in stops]
        for end, stop in zip(ends, stops, strict=True):
            assert end is None or len(text) - len(piece) + end == text.index(stop) + len(stop)
        if any(stop in text for stop in stops):
            return
        for each, stop in zip(found, stops, strict=True):
            assert each.num_matched == max(n for n in range(len(stop)) if text.endswith(stop[:n]))


HALVES, PARTS = fake_tokenizer().encode("é"), [EOS_ID, *fake_tokenizer().encode("aabé")]


@given(
    tokens=st.lists(st.sampled_from(PARTS), max_size=12),
    chunks=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    stops=st.lists(st.text("abé\ufffd", min_size=1, max_size=3), max_size=2),
    keeps=st.tuples(st.booleans(), st.booleans()),
)
@example(tokens=[PARTS[1], *HALVES], chunks=[1] * 12, stops=["é"], keeps=(False, True))
@example(tokens=[PARTS[1], EOS_ID, PARTS[3]], chunks=[1] * 12, stops=["b"], keeps=(False, True))
def test_the_tokens_of_a_text_do_not_depend_on_how_they_came(
    tokens: list[int], chunks: list[int], stops: list[str], keeps: tuple[bool, bool]
) -> None:
    """All at once, as drafts bring them, or a few: text, entries of logprobs and their offsets are the same, also where
    a token shows nothing, since it is special or a part of a character.
    """
    style, tokenizer = TextStyle(tuple(stops), frozenset(), *keeps, keeps_pieces=True), fake_tokenizer()

    def shown(sizes: list[int]) -> tuple[str, list[TokenPiece], int]:
        assembler, rest, text, pieces = style.assembler(tokenizer, ()), tokens, "", list[TokenPiece]()
        for size in sizes:
            text += assembler.push(rest[:size], [TokenLogprobs(token, -1.0, ()) for token in rest[:size]])
            rest, pieces = rest[size:], pieces + assembler.take_pieces()
        text += assembler.finish()
        return text, pieces + assembler.take_pieces(), assembler.num_tokens

    text, pieces, num_tokens = shown([len(tokens)])
    assert (text, pieces, num_tokens) == shown(chunks)
    assert [piece.token for piece in pieces] == tokens[: len(pieces)] and len(pieces) <= num_tokens
    if text == tokenizer.decode(tokens, skip_special_tokens=keeps[1]):
        assert len(pieces) == len(tokens)


def test_stop_strings_cost_little_whatever_the_text_is() -> None:
    """16 of 1,000 characters that nearly match all the time: work per character is bounded."""
    stop, steps = _StopString("a" * 999 + "c"), 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    stop._shorter = Counted([0])
    for _ in range(20):
        stop.push("a" * 998 + "b")
    assert steps < 3 * 20 * 999
