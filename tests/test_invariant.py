"""Tests, token by token in every mode, that the text depends only on target, prompt, parameters and seed.

With the fake language texts are bitwise equal whatever the shapes of the batches. With the reference pair, on the
runtimes that users run, a near-tie in float32 may explain a difference. The full run is `python -m bench.invariant`.
What a model is tried with for `--exact bitwise` is tested over that language, too: exact, then broken.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from bench.invariant import GRAMMAR, PENALTY, RULES, SAMPLINGS, count, make_requests, measure
from bench.invariant_modes import CUT, FAULTY, MIXED, MODES, PATH, REPEATED, WRONG_BLOCKS, WRONG_TREE, generate_all
from bench.plain_text import first_difference, plain_texts
from numpy.typing import NDArray
from tests.agents import slow
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import EOS_ID, FakeServer, fake_tokenizer, serve_fake

from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.pending.policy import Policy
from outrider.cloud.recent.store import MemoryStore
from outrider.edge.devices.placement import EMULATED_NPU, DraftChoice
from outrider.edge.drafting.drafter import Drafter, ModelDrafter
from outrider.edge.lab.laboratory import ALIKE, open_lab
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.bitwise_check import blocks_needed, other_rows

NUM_WORKERS = 3
NUM_TEXTS = {Policy.AUTO: 6, Policy.VERIFY: 3}
MAX_TOKENS = 40
CASES = [
    *((mode, Policy.AUTO) for mode in MODES),
    # Waits for drafts, so that many are verified however fast the machine is. The other policy weighs measured times.
    *((mode, Policy.VERIFY) for mode in ("stream", PATH, MIXED, FAULTY, CUT)),
]
STEP_S = {Policy.AUTO: 0.002, Policy.VERIFY: 0.02}
"""The first lets drafts arrive between steps. The second is long beside a draft's way, so it is worth a wait."""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[Policy, FakeServer]]:
    """One verifier of each policy for all modes: no state of one mode may reach another."""
    with ExitStack() as stack:
        yield {
            policy: stack.enter_context(
                serve_fake(config=EngineConfig(policy=policy), recent=MemoryStore(), runtime=slow(step_s))
            )
            for policy, step_s in STEP_S.items()
        }


class Swapping(FakeSequenceRuntime):
    """The target itself, but in four of ten contexts the two highest logits have changed places.

    So what misses is often the second guess, as with a real draft.
    """

    def _rows(self, sums: NDArray[np.uint64]) -> NDArray[np.float32]:
        rows = super()._rows(sums)
        for row, context in zip(rows, sums, strict=True):
            if int(context) % 10 < 4:
                best = np.argpartition(row, -2)[-2:]
                row[best] = row[best[::-1]]
        return rows


@pytest.fixture(scope="module")
def drafters() -> list[Drafter]:
    """One drafter per worker; about 70 % of its tokens are accepted."""
    return [ModelDrafter(Swapping(vocab_size=fake_tokenizer().size)) for _ in range(NUM_WORKERS)]


NARROW = ProcessorOptions(frequency_penalty=0.3, typical_p=0.9, xtc_probability=0.4, xtc_threshold=0.05)


def _requests(sampling: SamplingParams, rules: ProcessorOptions = PLAIN) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=tuple(fake_tokenizer().encode(f"def number_{seed}(token):")),
            params=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed),
            max_tokens=MAX_TOKENS,
            stop_ids=frozenset({EOS_ID}),
            processors=rules,
        )
        for seed in range(6)
    ]


SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string", "pattern": "^[a-z]{2,9}$"}, "sizes": {"items": {"type": "integer"}}},
    "required": ["id", "sizes"],
    "additionalProperties": False,
}


@cache
def _grammar_requests() -> list[GenerationRequest]:
    """With forced tokens and free ones; the device drafts inside the grammar. The second has a penalty, too."""
    tokenizer = fake_tokenizer()
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)) as compiler:
        specs = [
            GrammarSpec.json_schema(SCHEMA),
            GrammarSpec("regex", "def [a-z]+(\\([a-z, ]{0,20}\\): return [a-z]{9}\n)+"),
        ]
        return [
            replace(
                request,
                grammar=spec,
                draft_grammar=compiler.compile(spec),
                processors=PENALTY if spec.kind == "regex" else PLAIN,
            )
            for request, spec in zip(_requests(SAMPLINGS[GRAMMAR]), specs, strict=False)
        ]


def _requests_of(name: str, num: int) -> list[GenerationRequest]:
    """Of a name in `SAMPLINGS`."""
    if name == GRAMMAR:
        return _grammar_requests()
    if name in RULES:
        return [_requests(SAMPLINGS[name], RULES[name])[0], _requests(SAMPLINGS[name], NARROW)[1]]
    return _requests(SAMPLINGS[name])[:num]


@cache
def _targets_own(name: str, num: int) -> list[tuple[int, ...]]:
    """The texts of `_requests_of`, whatever the mode: one after the other, without a server."""
    return plain_texts(FakeBatchRuntime(vocab_size=fake_tokenizer().size), _requests_of(name, num))


def num_hits(server: FakeServer) -> int:
    """Requests that were drafted from an earlier text, so far."""
    assert server.core.recent is not None
    return server.core.recent.stats().counts.hits


def own_texts(server: FakeServer, drafters: list[Drafter], mode: str, num: int) -> list[GenerationResult]:
    """Texts of every kind, each the target's own bit for bit; no session stays open. num: of those without rules."""
    results, size = list[GenerationResult](), fake_tokenizer().size
    for name in SAMPLINGS:
        generated = asyncio.run(generate_all(mode, server.url, drafters, size, _requests_of(name, num)))
        assert [result.tokens for result in generated] == _targets_own(name, num)
        results += generated
    server.wait_until(lambda: server.core.engine.stats().running == len(server.core.sessions) == 0)
    return results


@pytest.mark.parametrize(("mode", "policy"), CASES)
def test_every_mode_gives_the_targets_own_text(
    servers: dict[Policy, FakeServer], drafters: list[Drafter], mode: str, policy: Policy
) -> None:
    """Greedy and sampled."""
    server = servers[policy]
    hits_before = num_hits(server)
    results = own_texts(server, drafters, mode, NUM_TEXTS[policy])
    counts = ((len(result.tokens), result.num_tested, result.num_accepted) for result in results)
    num_tokens, num_tested, num_accepted = map(sum, zip(*counts, strict=True))
    # The mode did what it is for; otherwise equal texts would prove nothing.
    assert (num_hits(server) > hits_before) == (mode == REPEATED)
    if mode == CUT:
        assert sum(result.num_sessions - 1 for result in results) >= len(results)
    elif mode == FAULTY:
        assert sum(result.num_failed_posts for result in results) > 0
    elif mode == WRONG_BLOCKS:
        assert num_accepted < 0.02 * num_tested  # a wrong token, shifted, may be correct by chance
    elif mode == WRONG_TREE:
        # A tree that the server may have stopped to verify, but that was sent and was not the text.
        assert sum(result.num_sent for result in results) > 0
        assert sum(num for result in results for num in result.hits.values()) < 0.02 * num_tokens
    if policy is Policy.VERIFY or mode == "stop-and-wait":
        assert 0.2 * num_tokens < num_accepted < num_tested
        ranks = {rank for result in results for rank in result.hits}
        assert mode not in (PATH, "stop-and-wait") or ranks == {0}
        assert mode != "stream" or len(ranks) > 1  # alternatives, too


def test_the_verifiers_own_lookup_gives_the_targets_own_text(drafters: list[Drafter]) -> None:
    """With a device's drafts and without, greedy and sampled."""
    with serve_fake(config=EngineConfig(policy=Policy.VERIFY, looks_up=True)) as server:
        for mode in ("no draft", "stream"):
            own_texts(server, drafters, mode, 2)
        assert server.core.engine.stats().totals.lookup_proposed > 0


def test_the_reference_pair_keeps_its_text_in_every_mode(reference_pair: PairPaths) -> None:
    """On OpenVINO, cloud in its own process: a near-tie in float32 explains every difference."""
    with open_lab(reference_pair.target, reference_pair.draft, cloud_options=(*ALIKE, "--recent")) as lab:
        counts = measure(lab, argparse.Namespace(prompts=2, max_tokens=16, workers=2))
    cells = [count for by_mode in counts.values() for count in by_mode.values()]
    assert len(cells) == len(SAMPLINGS) * len(MODES)
    assert all(count.num_texts == 2 and count.num_tokens > 0 for count in cells)
    assert sum(by_mode[CUT].num_resumed for by_mode in counts.values()) > 0
    assert all(difference.is_near_tie for count in cells for difference in count.differences)


@pytest.mark.parametrize("kind", ["emulated NPU", "ONNX Runtime"])
def test_drafts_of_every_runtime_keep_the_targets_text(
    kind: str, reference_pair: PairPaths, request: pytest.FixtureRequest
) -> None:
    """Each rounds in its own way and keeps its own cache; whatever it drafts, the text is the target's."""
    if kind == "emulated NPU":
        draft, choice = request.getfixturevalue("npu_pair").draft, DraftChoice(emulate_npu=True)
    else:
        draft, choice = request.getfixturevalue("onnx_draft"), DraftChoice("onnxruntime")
    provider = EMULATED_NPU if choice.emulate_npu else "CPUExecutionProvider"
    target = Bundle.open(reference_pair.target)
    with (
        open_lab(target.path, draft, choice) as lab,
        closing(open_batch_runtime("openvino", target.model_file, RuntimeOptions(num_threads=1))) as runtime,
    ):
        assert lab.placement.provider == provider and lab.placement.notes == ()
        vocab_size = target.manifest.architecture.vocab_size
        requests = [
            *make_requests(lab, SAMPLINGS["greedy"], 1, 32),
            *make_requests(lab, SAMPLINGS["temperature 0.8"], 2, 32),
        ]
        expected = plain_texts(runtime, requests)
        num_tested = num_accepted = 0
        for mode in ("stop-and-wait", FAULTY):  # these draft at any speed of the draft model
            results = asyncio.run(generate_all(mode, lab.url, [lab.drafter], vocab_size, requests))
            counted = count(runtime, requests, expected, results)
            assert counted.num_texts == 3 and all(difference.is_near_tie for difference in counted.differences)
            assert all(result.draft_error is None and result.num_drafted > 0 for result in results)
            num_tested += counted.num_tested
            num_accepted += counted.num_accepted
        # With a wrong cache drafts would be accepted by chance only; with no rejection nothing would be rolled back.
        assert 0.4 * num_tested < num_accepted < num_tested


def test_an_unexplained_difference_is_detected() -> None:
    """The measurement can fail: another token, or a text that ends early, is a difference and not a near-tie."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size)
    for name in SAMPLINGS:
        (request, *_) = _requests_of(name, 1)
        (expected,) = plain_texts(runtime, [request])
        assert first_difference(runtime, request, expected, expected) is None
        wrong = (*expected[:5], (expected[5] + 1) % fake_tokenizer().size, *expected[6:])
        for text, index in ((wrong, 5), (expected[:7], 7)):
            difference = first_difference(runtime, request, expected, text)
            assert difference is not None and difference.index == index and not difference.is_near_tie


def test_a_near_tie_explains_a_difference() -> None:
    """Two tokens with equal logits have the same score."""

    class TwoEqual(FakeBatchRuntime):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            rows = super().forward(batch)
            rows[:, [3, 4]] = rows.max() + 1.0
            return rows

    request = GenerationRequest(prompt=(1, 2), max_tokens=3)
    difference = first_difference(TwoEqual(vocab_size=8), request, (3, 3, 3), (3, 4, 3))
    assert difference is not None and difference.is_near_tie and difference.index == 1


VOCAB = 64
BROKEN: dict[str, Callable[[Sequence[SequenceSlice]], bool]] = {
    "in one step with all before": lambda batch: len(batch[0].tokens) > 32,
    "beside another text": lambda batch: len(batch) > 1 and batch[1].mask is None and batch[0].mask is None,
    "in a tree": lambda batch: batch[0].mask is not None,
}


@pytest.mark.parametrize("name", [None, *BROKEN])
def test_rows_that_depend_on_their_company_are_found(name: str | None) -> None:
    """By the last bit of one logit."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=16, num_blocks=blocks_needed(40, 16))

    def forward(batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        rows = runtime.forward(batch)
        if name is not None and BROKEN[name](batch):
            rows[:, 3] = np.nextafter(rows[:, 3], np.float32(9.0))
        return rows

    assert other_rows(forward, VOCAB, 16, before=40, has_trees=True) == name
    assert other_rows(forward, VOCAB, 16, before=40, has_trees=False) == (None if name == "in a tree" else name)
