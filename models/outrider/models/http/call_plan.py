"""Plans one completion call: how its texts are generated, cut and shown, and which it allows. The same for the cloud
and the device.

How a model writes tool calls and reasoning is found from what its chat template contains. The grammar follows from the
call's own, its tools, and the model's reasoning. Calls of given tools, or free text, are written in Lark with JSON
schemas, for llguidance: for `tool_choice` "required" or a function's name, strict functions, and tools beside a JSON
schema of the content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from outrider.models.errors import RequestError, RuntimeUnavailable, TokenizerError
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.reasoning import BEGIN, END, after_reasoning, marks_reasoning, opens_reasoning
from outrider.models.grammar.spec import GrammarSpec, dump_schema, with_whitespace
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.chat_reader import ChatStyle
from outrider.models.http.encoding import Workers
from outrider.models.http.errors import FieldError
from outrider.models.http.openai import ChatRequest, CompletionRequest, GenerationRequest
from outrider.models.http.openai_fields import NamedTool, Tool
from outrider.models.http.shapes import LogprobWriter, Look
from outrider.models.http.structured import FIELDS
from outrider.models.text.tokenizer import Tokenizer


def grammar_of_call(
    body: GenerationRequest, style: ChatStyle, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
) -> GrammarSpec | None:
    """The grammar of the texts of a call; None for free text.

    style: by `chat_style`. prompts: token ids of each; a chat has one. Raises FieldError `invalid_grammar` or
    `unsupported_parameter`.
    """
    spec = body.grammar()
    if not isinstance(body, ChatRequest):
        return spec
    if style.tools is not None:
        spec = _with_tools(body, style, style.tools, tokenizer, spec)
    if spec is None or not style.has_reasoning:
        return spec
    try:
        return after_reasoning(spec, tokenizer, prompts[0])
    except RequestError as error:
        raise FieldError(error.code, str(error), param="response_format") from None


def asks_for_grammar(body: GenerationRequest) -> bool:
    """Whether `grammar_of_call` may find a grammar: free text waits for no thread."""
    if any(getattr(body, name) not in (None, {"type": "text"}) for name in FIELDS):
        return True
    return isinstance(body, ChatRequest) and bool(body.tools_of_grammar or body.has_strict_tools)


def _with_tools(
    body: ChatRequest, style: ChatStyle, form: str, tokenizer: Tokenizer, asked: GrammarSpec | None
) -> GrammarSpec | None:
    """The grammar where tools may be called. asked: that of the content."""
    is_one = style.is_one_call or style.is_forced
    content: str | None = None
    tools = body.tools_of_grammar
    if not tools:
        if asked is None and not body.has_strict_tools:
            return None
        tools = body.tools or []
        content = FREE_TEXT if asked is None else _content(asked)
    try:
        return GrammarSpec("grammar", tool_grammar(form, tools, tokenizer, is_one=is_one, content=content))
    except RequestError as error:
        raise FieldError(error.code, f"tools: {error}", param="tools", status=error.status) from None


def _content(asked: GrammarSpec) -> str:
    """A rule's right side for the content beside calls."""
    match asked.kind:
        case "json_schema" | "json_object":
            schema = json.loads(asked.text) if asked.kind == "json_schema" else _ANY_OBJECT
            return f"%json {dump_schema(with_whitespace(schema, flexible=False))}"
        case "choice":
            texts = dict.fromkeys(json.loads(asked.text))
            return " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
        case kind:
            raise FieldError(
                "unsupported_parameter",
                f'tools is not supported beside a grammar of kind {kind}; leave it out, or set tool_choice to "none"',
                param="tools",
            )


_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
# As chat templates show calls to the model. Without it a model could write spaces for ever.
_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY: Final = r"/(.|\n)*/"
_NO_OBJECT: Final = r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
"""Text that the Llama parser does not take for a call."""
FREE_TEXT: Final = "free_text"


def tool_grammar(
    form: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_one: bool, content: str | None = None
) -> str:
    """Lark rules for one call of one of the tools, or for one after the other.

    form: a key of `chat_reader.READERS`. content: what the text may be instead: None, calls only; `FREE_TEXT`, any
    text, also before the calls; else the right side of a rule.
    """
    key = "parameters" if form == "llama" else "arguments"
    rules = [f"call_{index}: %json {_call_schema(tool, key)}" for index, tool in enumerate(tools)]
    rules.append("one: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    is_free = content == FREE_TEXT
    plain = _NO_OBJECT if form == "llama" else _ANY
    if form == "hermes":
        begin, end = _marker(tokenizer, "<tool_call>"), _marker(tokenizer, "</tool_call>")
        first = _opened(tokenizer, "<tool_call>", rules) if is_free else begin
        call = f'{first} "\\n" one "\\n" {end}'
        calls = call if is_one else f'{call} ("\\n" {begin} "\\n" one "\\n" {end})*'
    elif form == "mistral":
        first = _opened(tokenizer, "[TOOL_CALLS]", rules) if is_free else _marker(tokenizer, "[TOOL_CALLS]")
        calls = f'{first} "[" one "]"' if is_one else f'{first} "[" one (", " one)* "]"'
    else:
        calls = "one" if is_one else 'one ("; " one)*'
        if is_free:  # the tag is optional, and only a call follows it
            tagged = _opened(tokenizer, "<|python_tag|>", rules, plain)
            rules.append(f"calls: {calls}")
            calls = f"calls | {tagged} calls"
    if content is not None:
        rules.append(f"content: {plain if is_free else content}")
        calls = f"{calls} | content"
    return "\n".join([f"start: {calls}", *rules, ""])


def _opened(tokenizer: Tokenizer, marker: str, rules: list[str], text: str = _ANY) -> str:
    """What free text and the marker after it are called; adds the rules. The text has no marker."""
    rules.append(f"TEXT: {text}")
    spelled = _marker(tokenizer, marker)
    if spelled.startswith("<["):  # a text has no special token
        rules.append(f"opened: TEXT {spelled}")
    else:
        rules.append(f"opened[lazy]: TEXT {spelled}")
    return "opened"


def _call_schema(tool: Tool, key: str) -> str:
    function = tool.function
    arguments = function.parameters if function.parameters is not None else _ANY_OBJECT
    # References of a schema point at its own root, which is one level deeper here.
    properties = {"name": {"const": function.name}, key: _moved(arguments, f"#/properties/{key}")}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["name", key],
        "additionalProperties": False,
        # As `response_format`: keywords that the library does not know count where the schema is strict.
        "x-guidance": {**_SPELLING, **({} if function.strict else {"lenient": True})},
    }
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _marker(tokenizer: Tokenizer, text: str) -> str:
    """A marker in Lark: by its id where it is a special token, which has no text there."""
    index = tokenizer.token_id(text)
    return f"<[{index}]>" if index is not None and index in tokenizer.special_ids else json.dumps(text)


class Grammars:
    """Makes the compiler on first use. make: a compiler for the served model; takes a second for a large vocabulary.

    is_needed: whether a text without its grammar would be wrong; a device that only drafts goes on without the library.
    """

    def __init__(self, make: Callable[[], GrammarCompiler], *, is_needed: bool = True) -> None:
        self._compiler = cache(make)
        self._is_needed = is_needed

    async def spec(
        self, workers: Workers, owner: bytes, salt: bytes, make: Callable[..., GrammarSpec | None], *args: Any
    ) -> GrammarSpec | None:
        """What `make(*args)` returns, in a thread: reading a schema of 60 kB takes some 50 ms.

        Raises RequestError as `make`, and 429 `too_many_grammars`, before that, where no grammar of this client would
        be compiled.
        """
        self._compiler().require_calm((owner, salt))
        return await workers.run(owner, make, *args)

    async def compiled(self, spec: GrammarSpec | None, owner: bytes, salt: bytes = b"") -> CompiledGrammar | None:
        """The grammar; None for None. Raises RequestError as `GrammarCompiler.compile_for`."""
        if spec is None:
            return None
        try:
            compiler = self._compiler()
            if not compiler.stop_ids:
                words = "this model has no end token, so no grammar can end its text"
                raise RequestError("unsupported_parameter", words)
            return await compiler.compile_for(spec, owner, salt)
        except RuntimeUnavailable as error:  # the library is not installed
            if not self._is_needed:
                return None
            raise RequestError("unsupported_parameter", str(error), status=501) from None
        except TokenizerError as error:
            raise RequestError("unsupported_parameter", str(error)) from None


MARKERS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
"""Of tool calls. Where they are special tokens, text must show them to be read."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes. tools: the format of its calls, a key of `chat_reader.READERS`; None: none that is known.

    has_reasoning: its template marks reasoning by `<think>`.
    """

    tools: str | None = None
    has_reasoning: bool = False


def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """The dialect of this tokenizer's chat template."""
    with_tools = tokenizer.template_source(has_tools=True) or ""
    return Dialect(_tools_in(with_tools), marks_reasoning(tokenizer))


def _tools_in(template: str) -> str | None:
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM 4.5 write XML there.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return "llama"
    return None


def chat_style(body: GenerationRequest, dialect: Dialect, model: str) -> ChatStyle:
    """How the texts of a call are read. Raises FieldError for tools that this model's texts cannot be read for."""
    if not isinstance(body, ChatRequest):
        return ChatStyle()
    if body.may_call_tools and dialect.tools is None:
        raise FieldError(
            "unsupported_parameter",
            f"tools is not supported: the chat template of {model} has no tool calls that this server can read "
            "(Hermes, Llama 3, Mistral); leave it out",
            param="tools",
        )
    return ChatStyle(
        tools=dialect.tools if body.may_call_tools else None,
        has_reasoning=dialect.has_reasoning,
        is_one_call=body.parallel_tool_calls is False or dialect.tools == "llama",  # its template takes one back
        is_forced=isinstance(body.tool_choice, NamedTool),
        shows_reasoning=body.include_reasoning is not False,
    )


def text_style(body: GenerationRequest, style: ChatStyle, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> TextStyle:
    """How the texts of a call are cut and shown. stop_ids: end a text."""
    marks = [*(MARKERS if style.tools is not None else ()), *((BEGIN, END) if style.has_reasoning else ())]
    return TextStyle(
        stop_strings=tuple(body.stop_strings),
        stop_ids=stop_ids,
        includes_stop=bool(body.include_stop_str_in_output),
        skips_special=body.skip_special_tokens is not False,
        shown=tokenizer.special_ids.intersection(map(tokenizer.token_id, marks)),
        keeps_pieces=body.num_logprobs is not None,
    )


def engine_logprobs(body: GenerationRequest) -> int | None:
    """Logprobs that a text needs: those to show, or those to choose the best by."""
    if body.num_logprobs is not None:
        return body.num_logprobs
    return 0 if body.num_each > body.num_kept else None


def look_of(
    body: GenerationRequest,
    style: ChatStyle,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    echoed: Sequence[str],
) -> Look:
    """How the answer shows its texts. prompts: token ids of each prompt. echoed: of these, as `echoes` has it."""
    num_kept = body.num_kept
    insides = [style.has_reasoning and opens_reasoning(tokenizer, tuple(prompt)) for prompt in prompts]
    num_top = body.num_logprobs
    return Look(
        logprobs=None if num_top is None else LogprobWriter(tokenizer, num_top),
        echoes=[echo for echo in echoed for _ in range(num_kept)],
        style=style,
        insides=[inside for inside in insides for _ in range(num_kept)],
    )


def echoes(body: CompletionRequest, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What is echoed of each prompt: its text as it came; the text of its ids, or of those that are left of it, which
    takes a tenth of a second for what a body can hold.
    """
    return [
        given if isinstance(given, str) and body.truncate_prompt_tokens is None else tokenizer.decode(ids)
        for given, ids in zip(body.prompts(), prompts, strict=True)
    ]
