"""Turns a request's texts into token ids, in threads: few at a time, and one per owner.

A text that cannot fit the model's context is refused before it is tokenized, by its number of characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from outrider.models.errors import RequestError, TokenizerError
from outrider.models.http.bodies import sampling_of
from outrider.models.http.errors import FieldError
from outrider.models.http.limits import Turns
from outrider.models.http.openai import ChatRequest, CompletionRequest, Conversation, GenerationRequest
from outrider.models.http.openai_fields import ProcessorParameters
from outrider.models.processors.options import ProcessorOptions, bad_word_ids
from outrider.models.text.predicted import Prediction
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import MAX_PREDICTION_TOKENS

_FORMATS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
"""Tokens before the prefix, before the suffix, and after both; without the last, the suffix comes first."""


def fill_in_prompt(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    """The token ids of a prompt for the text between both. Raises FieldError where the model has no such tokens."""
    for names in _FORMATS:
        known = [index for name in names if (index := tokenizer.token_id(name)) is not None]
        if len(known) == len(names):
            break
    else:
        raise FieldError(
            "unsupported_parameter",
            "suffix is not supported: this model has no tokens to fill in text, such as <|fim_middle|>; leave it out",
            param="suffix",
        )
    before = prefix if isinstance(prefix, list) else tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    first = [tokenizer.bos_token_id] if tokenizer.begins_with_bos and tokenizer.bos_token_id is not None else []
    begin_prefix, begin_suffix, *end = known
    if not end:
        return [*first, begin_suffix, *after, begin_prefix, *before]
    return [*first, begin_prefix, *before, begin_suffix, *after, *end]


T = TypeVar("T")

MAX_THREADS: Final = 2
"""Texts in work together: more threads would only contend with the model for cores."""
_USUAL_BYTES: Final = 8
"""Of a token, in a text that is tokenized at once: with so many most texts still fit."""
_PART_CHARS: Final = 1 << 15
_MIN_CUT_TOKENS: Final = 1 << 14
"""Of a prompt before `truncate_prompt_tokens` cuts it, if the model's context is small. Otherwise twice the context."""


class Workers:
    """Runs functions in threads: one per owner at a time, `max_threads` in all. Lives on one event loop.

    The threads are its own. The loop's also look up names, which cannot be cancelled: where no name server answers, all
    of them wait for it.
    """

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self.turns = Turns(max_threads)
        self._threads = ThreadPoolExecutor(max_threads, "outrider-texts")

    async def run(self, owner: bytes, function: Callable[..., T], *args: Any) -> T:
        """Returns what `function(*args)` returns, when its turn has come."""
        await self.turns.take(owner)
        work = asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

        def finish(done: asyncio.Future[T]) -> None:
            self.turns.release(owner)
            if not done.cancelled():
                done.exception()  # a cancelled caller does not read it

        # A thread cannot be cancelled: a cancelled caller's turn lasts until its thread is done.
        work.add_done_callback(finish)
        try:
            return await asyncio.shield(work)
        finally:
            del work  # with its error it would be a cycle, which holds what the function was given

    def close(self) -> None:
        """Ends the threads, once what they run is done. `run` may not be called any more."""
        self._threads.shutdown(wait=False)


def check_length(tokenizer: Tokenizer, max_tokens: int, text: str) -> None:
    """Raises RequestError `context_length_exceeded` if no tokenization of `text` fits `max_tokens`."""
    max_chars = max_tokens * tokenizer.max_token_chars
    if len(text) > max_chars:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(text)} characters; this server takes at most {max_tokens} tokens, which have at most "
            f"{max_chars}. Send a shorter prompt",
        )


def has_far_too_many(tokenizer: Tokenizer, max_tokens: int, text: str) -> bool:
    """Whether a long text has clearly more than `max_tokens`, found part by part.

    One of rare characters has a token for each byte, and the tokenizer takes 100 bytes and more for each: a text of
    1 MiB at once takes 110 MB.
    """
    if len(text.encode(errors="replace")) <= _USUAL_BYTES * max_tokens:
        return False
    num_tokens = 0
    for start in range(0, len(text), _PART_CHARS):
        num_tokens += len(tokenizer.encode(text[start : start + _PART_CHARS], add_special_tokens=False))
        if num_tokens > max_tokens + max_tokens // _USUAL_BYTES:  # what the parts' ends cut counts twice
            return True
    return False


def check_call(tokenizer: Tokenizer, max_tokens: int, body: GenerationRequest, model: str) -> None:
    """Raises RequestError for prompts that cannot fit, and for messages to a model without a template."""
    if isinstance(body, CompletionRequest):
        check_prompts(tokenizer, max_tokens, body)
    elif not tokenizer.has_chat_template:
        raise no_chat_template(model)


def encode_call(tokenizer: Tokenizer, max_tokens: int, body: GenerationRequest) -> list[list[int]]:
    """The token ids of each prompt of a call; a conversation is one. Raises RequestError."""
    if isinstance(body, ChatRequest):
        return [encode_chat(tokenizer, max_tokens, body)]
    assert isinstance(body, CompletionRequest)
    return encode_prompts(tokenizer, max_tokens, body)


def check_prompts(tokenizer: Tokenizer, max_tokens: int, body: CompletionRequest) -> None:
    """Raises RequestError `context_length_exceeded` for what cannot fit, before it is tokenized or copied."""
    for prompt in (*body.prompts(), body.suffix):
        if isinstance(prompt, str):
            check_length(tokenizer, max_tokens, prompt)
        elif prompt is not None and body.truncate_prompt_tokens is None:
            check_tokens(max_tokens + 1, prompt)


def check_tokens(max_positions: int, prompt: Sequence[int]) -> None:
    """Raises RequestError `context_length_exceeded` if `prompt` leaves no room for a token of the answer."""
    if len(prompt) >= max_positions:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens; this server takes at most {max_positions - 1}",
        )


def encode_prompts(tokenizer: Tokenizer, max_tokens: int, body: CompletionRequest) -> list[list[int]]:
    """The token ids of each prompt. max_tokens: that fit. Raises RequestError."""
    prompts = [
        truncated(_encode_prompt(tokenizer, max_tokens, prompt, body), max_tokens, body) for prompt in body.prompts()
    ]
    for prompt in prompts:
        check_tokens(max_tokens + 1, prompt)
    return prompts


def _encode_prompt(
    tokenizer: Tokenizer, max_tokens: int, prompt: str | list[int], body: CompletionRequest
) -> list[int]:
    is_cut = body.truncate_prompt_tokens is not None
    for text in (prompt, body.suffix):
        if isinstance(text, str):
            _check_parts(tokenizer, max_tokens, text, is_cut=is_cut)
    if body.suffix:
        return fill_in_prompt(tokenizer, prompt, body.suffix)
    if isinstance(prompt, list):
        return prompt
    return tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)


def _check_parts(tokenizer: Tokenizer, max_tokens: int, text: str, *, is_cut: bool) -> None:
    """is_cut: only its last tokens are kept. They depend on the whole text with some tokenizers, so it is bounded."""
    most = max(2 * max_tokens, _MIN_CUT_TOKENS) if is_cut else max_tokens
    if has_far_too_many(tokenizer, most, text):
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(text)} characters, which are more than the {most} tokens that this server takes"
            f"{' before it cuts a prompt' if is_cut else ''}. Send a shorter prompt",
        )


def truncated(prompt: list[int], max_tokens: int, body: GenerationRequest | Conversation) -> list[int]:
    """The last tokens of a prompt, where the request asks for them only."""
    if body.truncate_prompt_tokens is None:
        return prompt
    most = max_tokens if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    return prompt[len(prompt) - most :] if 0 < most < len(prompt) else prompt


def encode_chat(tokenizer: Tokenizer, max_tokens: int, body: Conversation) -> list[int]:
    """The token ids of a conversation, through the model's chat template. Raises RequestError."""
    tools = body.tools_for_template()
    # Most templates know OpenAI's newer name of the role not at all: they refuse its messages, or leave them out.
    is_known = "developer" in (tokenizer.template_source(has_tools=bool(tools)) or "")
    messages = [message.for_template("developer" if is_known else "system") for message in body.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, variables=body.chat_template_kwargs)
    except TokenizerError as error:
        raise FieldError("chat_template_refused", str(error), param="messages") from None
    check_length(tokenizer, max_tokens, text)
    _check_parts(tokenizer, max_tokens, text, is_cut=body.truncate_prompt_tokens is not None)
    is_special = isinstance(body, GenerationRequest) and bool(body.add_special_tokens)
    if not (tokens := tokenizer.encode(text, add_special_tokens=is_special)):
        words = "the chat template makes no text of these messages; send one with content"
        raise FieldError("empty_prompt", words, param="messages")
    return truncated(tokens, max_tokens, body)


def check_prediction(tokenizer: Tokenizer, body: GenerationRequest) -> None:
    """Raises RequestError for a predicted output that cannot fit, before anything is tokenized."""
    if body.prediction is not None:
        num_chars = len(body.prediction.text)
        if num_chars > MAX_PREDICTION_TOKENS * tokenizer.max_token_chars:
            raise _prediction_too_long(f"{num_chars} characters")


def encode_prediction(tokenizer: Tokenizer, body: GenerationRequest) -> tuple[int, ...]:
    """The token ids of the predicted output, indexed; nothing without one. Raises RequestError for one too long."""
    if body.prediction is None:
        return ()
    text = body.prediction.text
    if has_far_too_many(tokenizer, MAX_PREDICTION_TOKENS, text):
        raise _prediction_too_long(f"{len(text)} characters, which are more")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) > MAX_PREDICTION_TOKENS:
        raise _prediction_too_long(f"{len(tokens)} tokens")
    found = Prediction(tokens)
    found.pairs  # noqa: B018  # made here, and not on the event loop
    return found


def _prediction_too_long(found: str) -> RequestError:
    return FieldError(
        "invalid_parameter",
        f"prediction: it has {found}; expected at most {MAX_PREDICTION_TOKENS} tokens. Send its first part",
        param="prediction",
    )


def no_chat_template(model: str) -> RequestError:
    """The error 400 where messages are sent to a model without a template."""
    return RequestError(
        "no_chat_template", f"{model} has no chat template, so it is not a chat model. Use /v1/completions"
    )


async def processors_of(
    workers: Workers, owner: bytes, tokenizer: Tokenizer, body: ProcessorParameters
) -> ProcessorOptions:
    """The logit processors of a completion, its bad words tokenized. Raises RequestError 400 `invalid_parameter`."""
    found: list[list[int]] = []
    if body.bad_words:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        found = await workers.run(owner, bad_word_ids, encode, body.bad_words)
    return sampling_of(lambda: body.processors(found))
