"""Runs those tests of tests/test_edge_agent.py on vLLM that hold for any server: devices that draft, resume, fail over.

Left out are those that pace the fake model's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests import test_edge_agent as same
from tests.vllm.serving import SharedEngine, TransformersDraft, only

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.results import GenerationRequest

globals().update(
    only(
        same,
        "test_the_text_is_the_targets_whatever_the_draft",
        "test_the_text_does_not_depend_on_the_depth",
        "test_a_stop_token_ends_the_text",
        "test_the_models_own_end_is_left_to_the_server",
        "test_a_cut_session_goes_on_as_if_nothing_had_happened",
        "test_chunks_that_cut_their_connection_at_random_change_nothing",
        "test_the_next_endpoint_takes_over_when_the_first_is_gone",
        "test_what_the_server_refuses_is_not_tried_again",
        "test_a_key_opens_the_server",
        "test_a_cancelled_generation_frees_the_server",
        "test_bytes_are_counted_as_they_cross",
    )
)


@pytest.fixture(scope="module", autouse=True)
def drafts_of_it(vllm: SharedEngine) -> Iterator[None]:
    """The module's tests see the target of transformers, and drafts of it."""

    def truth(request: GenerationRequest, vocab_size: int = 0) -> tuple[int, ...]:
        tokens = vllm.target_tokens(request.prompt, request.max_tokens, request.params)
        ends = [index for index, token in enumerate(tokens) if token in (request.stop_ids or ())]
        return tuple(tokens[: ends[0] + 1] if ends else tokens)

    def drafter(agreement: float = 0.7, on_step: Callable[[Sequence[int]], None] | None = None) -> ModelDrafter:
        return ModelDrafter(TransformersDraft(vllm.target_tokens, agreement, on_step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same, "truth", truth)
        patch.setattr(same, "drafter", drafter)
        yield
