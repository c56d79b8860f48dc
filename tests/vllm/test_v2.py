"""The equality tests on vLLM's V2 model runner; Triton's interpreter runs its kernels. `make test-vllm` sets it up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.requests import flat_request
from tests.serving import fake_tokenizer
from tests.vllm.gated import STEADY
from tests.vllm.serving import FAULTY_TOKEN, IS_CUDA, Reference, make_model, running_engine
from tests.vllm.test_choices import (
    ruled,
    test_a_text_goes_on_with_what_belongs_to_it,
    test_an_item_has_the_logprobs_of_all_its_passes,
    test_grammars_hold_on_vllm,
    test_logprobs_are_the_models_and_change_no_text,
    test_rules_give_the_same_text_with_and_without_drafts,
    test_what_no_token_fits_ends_alone,
)
from tests.vllm.test_equality import (
    ROOT_DIR,
    nothing,
    run_all,
    test_a_wait_for_drafts_changes_nothing,
    test_all_right_from_the_beginning,
    test_an_alternative_is_used_when_the_likeliest_branch_fails,
    test_texts_are_transformers_and_pick,
    texts,
)

from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.picks.sampling import SamplingParams

__all__ = [
    "ruled",
    "test_a_text_goes_on_with_what_belongs_to_it",
    "test_a_wait_for_drafts_changes_nothing",
    "test_all_right_from_the_beginning",
    "test_an_alternative_is_used_when_the_likeliest_branch_fails",
    "test_an_item_has_the_logprobs_of_all_its_passes",
    "test_grammars_hold_on_vllm",
    "test_logprobs_are_the_models_and_change_no_text",
    "test_rules_give_the_same_text_with_and_without_drafts",
    "test_texts_are_transformers_and_pick",
    "test_what_no_token_fits_ends_alone",
    "texts",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with running_engine(ROOT_DIR / "target", is_v2=True, scheduler=STEADY) as started:
        started.calibrate()
        yield started


def test_it_is_the_v2_runner(engine: VllmEngine) -> None:
    """And nothing that looks like it."""
    assert f"worker.{'gpu' if IS_CUDA else 'cpu'}.model_runner" in engine._processes.runner


def test_an_item_is_verified_in_two_passes(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """This runner rejects what is drafted behind a prompt's end, so the draft runs in the next step."""
    for index, (prompt, params, truth) in enumerate(texts[:4]):
        wrong = 7 if truth[index] != 7 else 8
        for draft, count in ((truth[:8], 9), ([*truth[:index], wrong, *truth[index + 1 : 6]], index + 1)):
            request = flat_request(prompt, params, len(draft) + 1, draft=tuple(draft), once=True)
            (found,) = run_all(engine, [(request, truth, nothing)])
            assert (found.wait().usage.target_passes, found.tokens) == (min(2, count), truth[:count])


def test_logits_that_are_not_finite_end_their_sequence_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not a number is reported by the worker; the tokens before it are committed. vLLM's own error
    for such rows, which an operator may have switched on, ends nothing.
    """
    monkeypatch.setenv("VLLM_RAISE_ON_LOGIT_NANS", "1")
    make_model(tmp_path, vocab_size=fake_tokenizer().size)
    truth = Reference(tmp_path)([5, 17, 99], 12)
    with running_engine(tmp_path, is_v2=True) as started:
        bad = flat_request((1, FAULTY_TOKEN), SamplingParams(), 12)
        good = flat_request((5, 17, 99), SamplingParams(), 12, draft=(*truth[:4], FAULTY_TOKEN))
        failed, fine = run_all(started, [(bad, [], nothing), (good, truth, nothing)])
        assert (failed.code, failed.tokens) == ("model_fault", [])
        assert (fine.wait().reason, fine.tokens) == ("length", truth)
