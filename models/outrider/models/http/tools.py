"""Defines the tools of a chat request, and what may be chosen of them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from outrider.models.errors import RequestError
from outrider.models.http.bodies import load

MAX_TOOLS: Final = 128
"""OpenAI's."""


class FunctionDefinition(BaseModel):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool; only functions are supported."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def with_read_arguments(calls: Any) -> Any:
    """The `tool_calls` of an earlier message with their arguments as objects, as chat templates expect them.

    OpenAI's messages have them as JSON text. What is no such text stays as it is. Raises RequestError for a text with
    more parts than a body may have.
    """
    if not isinstance(calls, list):
        return calls
    return [_read_one(call) for call in calls]


def _read_one(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        read = load(arguments.encode(), "the text of a tool call's arguments")
    except UnicodeEncodeError:
        return call
    except RequestError as error:
        if error.code == "malformed_json":
            return call
        raise
    if not isinstance(read, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": read}}
