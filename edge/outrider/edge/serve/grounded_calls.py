"""Grounds completion calls in documents: those of the server, or those that a request brings as texts.

An addition to OpenAI's messages: `documents` in requests, `passages` in answers and in a stream's first event. A
request names no file: what the server may read is its owner's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, StrictStr

from outrider.edge.retrieval.documents import Document
from outrider.edge.retrieval.grounding import Grounding, Library
from outrider.edge.retrieval.index import PassageIndex
from outrider.edge.serve.state import LocalCore
from outrider.models.http import openai
from outrider.models.http.errors import FieldError
from outrider.models.http.shapes import Shape
from outrider.models.process.extras import is_installed
from outrider.models.wire.fields import StrictMessage
from outrider.models.wire.protocol import ModelFacts

MAX_DOCUMENTS: Final = 256
MAX_TEXT_BYTES: Final = 1 << 17
"""Of all documents of a request, as UTF-8. They are indexed for it alone: 1 MiB takes seconds and 100 MB."""
MAX_NAME_CHARS: Final = 200
_PROMPT_SHARE: Final = 4
"""At least this part of the context is left to the answer, as far as the passages are concerned."""


class TextDocument(StrictMessage):
    """A document of a request: its text, never a path. name: what `passages` calls it."""

    text: StrictStr
    name: Annotated[StrictStr, Field(max_length=MAX_NAME_CHARS)] = "document"


TextDocuments = Annotated[list[TextDocument], Field(fail_fast=True, max_length=MAX_DOCUMENTS)]
_HELP: Final = "texts to find passages in; unset: the server's own documents, []: none"


class LocalCompletionRequest(openai.CompletionRequest):
    """POST /v1/completions of the local endpoint."""

    documents: TextDocuments | None = Field(default=None, description=_HELP)


class LocalChatRequest(openai.ChatRequest):
    """POST /v1/chat/completions of the local endpoint."""

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: neutral for name, neutral in openai.ChatRequest._unsupported.items() if name != "documents"
    }

    documents: TextDocuments | None = Field(default=None, description=_HELP)


def add_passages(shape: Shape, groundings: Sequence[Grounding]) -> None:
    """Adds passages to an answer: to the whole one, or to a stream's first event. choice: in which text's prompt."""
    shape.extras["passages"] = [
        {"choice": choice, **note} for choice, each in enumerate(groundings) for note in each.as_json()
    ]


Sources = Callable[[], Library]
"""The documents that a call is grounded in: those that it brought, or the server's. Blocking: indexes the former."""


def sources_of(core: LocalCore, documents: Sequence[TextDocument] | None) -> Sources | None:
    """What a call is grounded in; None: nothing. Raises RequestError 400 for too much text, and where this device
    cannot find passages.
    """
    if documents is None:
        library = core.library
        return (lambda: library) if library is not None else None
    brought = tuple(Document(each.name, each.text) for each in documents if each.text)
    if (size := sum(len(each.text.encode("utf-8", "surrogatepass")) for each in brought)) > MAX_TEXT_BYTES:
        raise FieldError(
            "invalid_parameter",
            f"documents: their texts have {size} bytes; expected at most {MAX_TEXT_BYTES} in all. Send less",
            param="documents",
        )
    if brought and not is_installed("bm25s"):
        raise FieldError(
            "unsupported_parameter",
            'documents: this device lacks the package bm25s; its owner can run: pip install "outrider[docs]"',
            param="documents",
        )
    if not brought:
        return None
    return lambda: Library(PassageIndex(brought), core.tokenizer, core.settings.docs_tokens)


def room_for_passages(facts: ModelFacts, num_prompt: int, max_tokens: int) -> int:
    """Tokens of passages that leave room for the answer."""
    least = facts.max_positions // _PROMPT_SHARE
    return max(0, facts.max_positions - 1 - num_prompt - min(max_tokens, least))


def ground_prompts(
    sources: Sources, prompts: Sequence[str], facts: ModelFacts, max_tokens: int, is_special: bool = True
) -> tuple[list[list[int]], list[Grounding]]:
    """The token ids of each prompt with its passages. Blocking. is_special: with the tokenizer's special tokens."""
    library = sources()
    encode = partial(library.tokenizer.encode, add_special_tokens=is_special)

    def grounded(prompt: str) -> tuple[list[int], Grounding]:
        plain = encode(prompt)
        found = library.ground(prompt, room_for_passages(facts, len(plain), max_tokens))
        return encode(found.before + prompt) if found.before else plain, found

    both = [grounded(prompt) for prompt in prompts]
    return [ids for ids, _ in both], [found for _, found in both]


def ground_messages(
    sources: Sources, messages: Sequence[openai.ChatMessage], facts: ModelFacts, max_tokens: int
) -> tuple[list[openai.ChatMessage], Grounding]:
    """The conversation with passages before the last words of the user. Blocking."""
    kept = list(messages)
    last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), None)
    if last is None:
        return kept, Grounding()
    texts = [str(message.for_template()["content"]) for message in messages]
    library = sources()
    num_prompt = sum(len(library.tokenizer.encode(text)) + _TURN_TOKENS for text in texts)
    found = library.ground(texts[last], room_for_passages(facts, num_prompt, max_tokens))
    if found.before:
        kept[last] = kept[last].model_copy(update={"content": found.before + texts[last]})
    return kept, found


_TURN_TOKENS: Final = 16
"""What a chat template may put around a turn."""
