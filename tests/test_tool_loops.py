"""Conversations through chat templates as strict as their models' own: instructions, and calls that come back."""

from __future__ import annotations

from typing import Any, Final

import pytest
from tests.serving import fake_tokenizer
from tests.test_tool_calls import tool, written

from outrider.models.http.call_plan import chat_style, dialect_of
from outrider.models.http.chat_reader import ChatReader
from outrider.models.http.encoding import encode_chat
from outrider.models.http.openai import ChatRequest

TURNS: Final = "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEMPLATES: Final = {
    "hermes": "{% if tools %}<tool_call>{% endif %}{% for m in messages %}" + TURNS,
    # As of Mistral 7B v0.3.
    "mistral": "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}{% for m in messages %}"
    "{% for id in ([m.tool_call_id] if m.role == 'tool' else m.tool_calls | default([]) | map(attribute='id')) %}"
    "{% if id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
    + TURNS,
    # As of Llama 3.1.
    "llama": "{% if tools %}<|python_tag|>{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endif %}" + TURNS,
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_takes_back_the_calls_that_it_led_to(form: str) -> None:
    """With the tool's answer, after turns without calls; its messages are as OpenAI's client holds them."""
    tokenizer = fake_tokenizer(chat_template=TEMPLATES[form])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "zip"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": [tool("time"), tool("weather")]})
    reader = ChatReader(chat_style(body, dialect_of(tokenizer), "m"))
    reader.push(written(form, ("time", {}), ("weather", {"city": "Rome"})), is_last=True)
    messages += [
        {"role": "assistant", "content": "9", "refusal": None, "tool_calls": None},
        {"role": "assistant", "content": "9", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": reader.calls},
        *({"role": "tool", "content": "9", "tool_call_id": call["id"]} for call in reader.calls),
    ]
    again = ChatRequest.model_validate({"messages": messages, "tools": [tool("time")]})
    assert tokenizer.decode(encode_chat(tokenizer, 4096, again)).endswith("tool: 9\nassistant: ")
    assert {call["id"].isalnum() for call in reader.calls} == {form == "mistral"}
    assert len(reader.calls) == (1 if form == "llama" else 2)


def test_a_developers_message_is_the_systems_where_the_template_knows_no_other() -> None:
    """Qwen's leaves a message out whose role it does not know."""
    plain = TEMPLATES["hermes"].replace("messages %}", "messages if m.role in ('system', 'user') %}")
    body = ChatRequest.model_validate({"messages": [{"role": "developer", "content": "Be brief."}]})
    for template, role in ((plain, "system"), (plain.replace("'system'", "'developer'"), "developer")):
        tokenizer = fake_tokenizer(chat_template=template)
        assert tokenizer.decode(encode_chat(tokenizer, 4096, body)) == f"{role}: Be brief.\nassistant: "
