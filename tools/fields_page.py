"""Writes docs/fields.md, the table of OpenAI's and vLLM's fields, from the code: `make docs`.

python -m tools.fields_page          writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from outrider.models.http.fields import VLLM, state_of
from outrider.models.http.openai import ChatRequest, CompletionRequest, GenerationRequest

PAGE: Final = Path(__file__).parent.parent / "docs" / "fields.md"
REQUESTS: Final[dict[str, type[GenerationRequest]]] = {"chat": ChatRequest, "completion": CompletionRequest}
OPENAI: Final[dict[str, list[str]]] = {
    "chat": [*chat_params.CompletionCreateParamsBase.__annotations__, "stream"],
    "completion": [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"],
}
"""The fields of OpenAI's own client."""

_BEGIN: Final = "<!-- from here to the end: tools/fields_page.py -->\n"


def page() -> str:
    """The whole page: its words as they stand, and the tables."""
    words, begin, _ = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    return words + begin + "".join(_tables())


def _tables() -> Iterator[str]:
    for kind, title in (("chat", "POST /v1/chat/completions"), ("completion", "POST /v1/completions")):
        for whose, names in (("OpenAI's", OPENAI[kind]), ("vLLM's additions", VLLM[kind])):
            yield f"\n## {title}: {whose}\n\n| field | state | remark |\n|---|---|---|\n"
            for name in sorted(set(names)):
                found = state_of(name, REQUESTS[kind])
                if found is None:
                    raise ValueError(f"models/http/fields.py says nothing of {name}; add it")
                yield f"| `{name}` | {found[0]} | {found[1]} |\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print("docs/fields.md")


if __name__ == "__main__":
    main()
