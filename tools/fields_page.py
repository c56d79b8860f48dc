"""Writes docs/fields.md from the code: each field of OpenAI's and vLLM's completions, and whether it works, is refused,
or is ignored. Part of `make docs`.

python -m tools.fields_page          writes the page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from outrider.models.http.openai import ChatRequest, CompletionRequest, GenerationRequest

PAGE: Final = Path(__file__).parent.parent / "docs" / "fields.md"
REQUESTS: Final[dict[str, type[GenerationRequest]]] = {"chat": ChatRequest, "completion": CompletionRequest}
OPENAI: Final[dict[str, list[str]]] = {
    "chat": [*chat_params.CompletionCreateParamsBase.__annotations__, "stream"],
    "completion": [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"],
}
"""The fields of OpenAI's own client."""

_BEGIN: Final = "<!-- from here to the end: tools/fields_page.py -->\n"

IGNORED: Final[Mapping[str, str]] = {
    "metadata": "nothing is stored",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "the cache has one policy; see docs/cache.md",
    "request_id": "send X-Request-Id",
    "return_mm_kwargs": "text only",
    "routed_experts_prompt_start": "experts are not reported",
    "safety_identifier": "nothing is stored",
    "service_tier": "one tier",
    "session_id": "requests are routed by their prefix",
    "store": "nothing is stored",
    "stream_interval": "each commit is sent at once",
    "user": "owners are keys",
}
"""Ignored by design: they change no text. Any field that no list names is ignored too: clients send many."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOTH: Final = _names("""
    top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval thinking_token_budget watermarking
    """)
VLLM: Final[Mapping[str, Sequence[str]]] = {
    "chat": (
        *_BOTH,
        *_names("""
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_prompt_text include_reasoning
    """),
    ),
    "completion": (*_BOTH, *_names("prompt_embeds response_format")),
}
"""vLLM's additions, of its version 0.32."""


def state_of(name: str, request: type[GenerationRequest]) -> tuple[str, str] | None:
    """What the field does in requests of this type, in a word, and a remark; None for a field that no list names."""
    if name in request.model_fields:
        remark = request.model_fields[name].description
        return "works", remark or ""
    if (neutral := request.neutral_values().get(name)) is not None:
        return "refused", f"except as {' or '.join(f'`{json.dumps(each)}`' for each in neutral)}" if neutral else ""
    return ("ignored", IGNORED[name]) if name in IGNORED else None


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
                    raise ValueError(f"nothing is said of {name} here; add it")
                yield f"| `{name}` | {found[0]} | {found[1]} |\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print("docs/fields.md")


if __name__ == "__main__":
    main()
