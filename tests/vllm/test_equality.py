"""The gate for every version of vLLM: with and without drafts, its texts are `pick` over transformers' logits.

The reference target, in float32.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.requests import flat_request
from tests.vllm.gated import STEADY
from tests.vllm.serving import Reference, running_engine
from tests.waiting import TIMEOUT_S

from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest
from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.tree_draft import ROOT, TreeDraft

ROOT_DIR = Path(__file__).parents[2] / "reference" / "outrider" / "reference"
SAMPLINGS = (
    SamplingParams(temperature=0.8, seed=1 << 62),
    SamplingParams(temperature=1.0, top_p=0.95, seed=2),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=3),
    SamplingParams(temperature=1.2, min_p=0.05, seed=(1 << 63) - 1),
    SamplingParams(),
)
NUM_TOKENS = 40
OTHER = 7
"""A token that stands for a wrong guess."""


Guess = Callable[[Sequence[int], int], list[list[int]]]
"""Drafts of what follows the first so many tokens of a text."""


class Text:
    """Generates one text, posting drafts after each commit; a sink."""

    def __init__(self, engine: VllmEngine, truth: Sequence[int], guess: Guess) -> None:
        self._engine, self._truth, self._guess = engine, truth, guess
        self.tokens, self.commits = list[int](), list[CommitEvent]()
        self.end: EndEvent | None = None
        self.ended, self._submitted = threading.Event(), threading.Event()

    def submit(self, request: GenerateRequest) -> Text:
        """Begins."""
        self.number = self._engine.submit(request, self)
        self._submitted.set()
        return self

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            assert event.base == len(self.tokens)
            self.commits.append(event)
            self.tokens += event.tokens
            paths = self._guess(self._truth, len(self.tokens))
            if paths and self._submitted.wait(TIMEOUT_S):
                self._engine.draft(self.number, len(self.tokens), paths)
        elif isinstance(event, EndEvent):
            self.end = event
            self.ended.set()

    def wait(self) -> EndEvent:
        """Waits for the end."""
        assert self.ended.wait(4 * TIMEOUT_S) and self.end is not None
        return self.end

    @property
    def code(self) -> str | None:
        """The code of the error that ended it; None if it ended well."""
        return getattr(self.wait().error, "code", None)


def run_all(engine: VllmEngine, asked: Sequence[tuple[GenerateRequest, Sequence[int], Guess]]) -> list[Text]:
    """The texts of requests, generated at once. Each request comes with its text, and with how its drafts guess."""
    running = [Text(engine, truth, guess).submit(request) for request, truth, guess in asked]
    for text in running:
        text.wait()
    return running


def nothing(truth: Sequence[int], at: int) -> list[list[int]]:
    return []


def right(truth: Sequence[int], at: int) -> list[list[int]]:
    return [list(truth[at : at + 20])] if at < len(truth) else []


def wrong(truth: Sequence[int], at: int) -> list[list[int]]:
    return [[OTHER if token != OTHER else OTHER + 1 for token in truth[at : at + 10]]] if at < len(truth) else []


def mixed(truth: Sequence[int], at: int) -> list[list[int]]:
    """Right for two tokens, then each right with chance 0.75; an alternative second."""
    rng = random.Random(at)
    path = [t if i < 2 or rng.random() < 0.75 else OTHER for i, t in enumerate(truth[at : at + 9])]
    return [path, [OTHER, *truth[at + 1 : at + 4]]] if path else []


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with running_engine(ROOT_DIR / "target", scheduler=STEADY) as started:
        started.calibrate()
        yield started


@pytest.fixture(scope="module")
def texts() -> list[tuple[tuple[int, ...], SamplingParams, list[int]]]:
    """Prompt, parameters, and the text by transformers."""
    reference, tokenizer = Reference(ROOT_DIR / "target"), Tokenizer.from_dir(ROOT_DIR / "target")
    rows = json.loads((ROOT_DIR / "prompts.json").read_text(encoding="utf-8"))[:100:20]
    prompts = [tuple(tokenizer.encode(row["text"], add_special_tokens=False)) for row in rows]
    return [(prompt, params, reference(prompt, NUM_TOKENS, params)) for prompt in prompts for params in SAMPLINGS]


@pytest.mark.parametrize("guess", [nothing, right, wrong, mixed])
def test_texts_are_transformers_and_pick(
    engine: VllmEngine,
    texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]],
    guess: Guess,
) -> None:
    """Twenty-five texts at once, five samplings; right drafts save passes, wrong ones change nothing."""
    asked = [
        (flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0), truth, guess) for prompt, params, truth in texts
    ]
    running = run_all(engine, asked)
    assert [text.tokens for text in running] == [truth for _, _, truth in texts]
    assert {(text.wait().reason, text.code) for text in running} == {("length", None)}
    passes = sum(text.wait().usage.target_passes for text in running)
    accepted = sum(text.wait().usage.accepted_tokens for text in running)
    assert passes + accepted == NUM_TOKENS * len(texts)
    assert accepted == 0 if guess in (nothing, wrong) else accepted > 0.2 * passes


def test_all_right_from_the_beginning(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """A draft of the whole text, which `max_draft` cuts: the fewest passes."""
    prompt, params, truth = texts[0]
    request = flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0, draft=tuple(truth))
    (text,) = run_all(engine, [(request, truth, nothing)])
    assert text.tokens == truth and text.wait().usage.target_passes <= 6


def test_an_alternative_is_used_when_the_likeliest_branch_fails(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """vLLM's steps are lines: the rest of a tree stays pending; its right branch is verified after the wrong one."""
    prompt, params, truth = texts[1]
    # Node 0 is right; below it, 1 is wrong and likelier, 2 and what follows are right.
    tail = truth[2:14]
    tree = TreeDraft(
        0,
        0,
        [truth[0], OTHER if truth[1] != OTHER else OTHER + 1, truth[1], *tail],
        [ROOT, 0, 0, 2, *range(3, 2 + len(tail))],
        [15, 14, 13, *[15] * len(tail)],
    )
    text = Text(engine, truth, nothing).submit(flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0))
    engine.draft_tree(text.number, tree)
    assert text.wait().usage.accepted_tokens > 2 and text.tokens == truth


def test_a_wait_for_drafts_changes_nothing(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """Sequences that sit steps out, as the policy decides, beside one that never waits."""
    asked = [
        (flat_request(prompt, params, NUM_TOKENS, lag_ms=5.0 if index else None), truth, right if index else nothing)
        for index, (prompt, params, truth) in enumerate(texts[:5])
    ]
    assert [text.tokens for text in run_all(engine, asked)] == [truth for _, _, truth in texts[:5]]
    stats = engine.stats()
    assert stats.running == stats.queued == 0 and stats.free_blocks == stats.num_blocks
