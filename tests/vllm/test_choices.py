"""What a chooser adds, on vLLM's V1 model runner."""

from __future__ import annotations

from tests.vllm.choices import test_an_item_has_the_logprobs_of_all_its_passes as test_an_item
from tests.vllm.choices import test_logprobs_are_the_models_and_change_no_text as test_logprobs
from tests.vllm.test_equality import engine, texts

__all__ = ["engine", "test_an_item", "test_logprobs", "texts"]
