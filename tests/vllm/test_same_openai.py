"""Runs tests/test_cloud_openai.py on vLLM, and several choices of one call."""

from __future__ import annotations

from tests import test_cloud_openai as same
from tests import test_openai_fields
from tests.vllm.serving import only, shared_by

globals().update(
    shared_by(same)
    | only(
        test_openai_fields,
        "test_each_choice_has_a_seed_of_its_own",
        "test_choices_of_a_chat",
        "test_the_best_of_several",
    )
)
