"""What a chooser adds, on vLLM's V1 model runner."""

from __future__ import annotations

from tests.vllm.choices import (
    ruled,
    test_a_text_goes_on_with_what_belongs_to_it,
    test_an_item_has_the_logprobs_of_all_its_passes,
    test_grammars_hold_on_vllm,
    test_logprobs_are_the_models_and_change_no_text,
    test_rules_give_the_same_text_with_and_without_drafts,
    test_what_no_token_fits_ends_alone,
)
from tests.vllm.test_equality import engine, texts

__all__ = [
    "engine",
    "ruled",
    "test_a_text_goes_on_with_what_belongs_to_it",
    "test_an_item_has_the_logprobs_of_all_its_passes",
    "test_grammars_hold_on_vllm",
    "test_logprobs_are_the_models_and_change_no_text",
    "test_rules_give_the_same_text_with_and_without_drafts",
    "test_what_no_token_fits_ends_alone",
    "texts",
]
