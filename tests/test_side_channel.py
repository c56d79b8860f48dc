"""Tests of what an eavesdropper of `bench.side_channel` records and learns."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from bench.eavesdropper import Read, Trace, padded
from bench.side_channel import Lane, interval, main
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import fake_tokenizer, serve_fake

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.results import GenerationRequest
from outrider.models.picks.sampling import SamplingParams


def test_the_wire_is_heard_from_the_first_token_on() -> None:
    """Both directions, from a read that comes down to the window's end, and the opening apart."""
    size = fake_tokenizer().size
    texts = tuple(
        (
            number == 2,
            number,
            GenerationRequest(
                prompt=tuple(5 + at % 20 for at in range(length)),
                params=SamplingParams(temperature=0.3, seed=number),
                max_tokens=512,
                stop_ids=frozenset(),
                ignore_eos=True,
            ),
        )
        for number, length in enumerate((4, 400, 4))
    )
    runtime = FakeBatchRuntime(vocab_size=size, on_step=lambda batch: time.sleep(0.01))
    with serve_fake(runtime=runtime) as server:
        drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=size, agreement=0.8))
        short, long, steady = asyncio.run(Lane(4.0, 0.5, 0.3, texts).listen(server.url, drafter))
    assert (short.prompt, long.prompt) == (0, 1) and short.opening < long.opening < steady.opening
    sizes = [read.num_bytes for read in steady.reads if read.is_up]
    assert not any(size % min(sizes) for size in sizes)  # several may come in one read
    for trace in (short, long, steady):
        assert trace.num_tokens > 0 and {read.is_up for read in trace.reads} == {False, True}
        assert trace.reads[0].at_s == 0.0 and not trace.reads[0].is_up
        assert all(0.0 <= read.at_s < 0.3 for read in trace.reads)


def _traces(sizes: dict[int, int], seeds: int = 8) -> list[Trace]:
    """Of prompts whose reads down are this large, at random times; and steady ones, which are all alike."""
    chance = random.Random(1)
    frames = tuple(Read(at * 0.02, at % 2 == 1, 256) for at in range(40))
    return [Trace(prompt, seed, 4300, 38, frames, is_steady=True) for prompt in sizes for seed in range(seeds)] + [
        Trace(
            prompt,
            seed,
            opening=500 + 10 * prompt,
            num_tokens=40,
            reads=tuple(
                Read(at * 0.05 + chance.random() / 100, at % 2 == 1, size + chance.randrange(2)) for at in range(20)
            ),
        )
        for prompt, size in sizes.items()
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(("sizes", "code"), [((40, 50, 60, 70), 0), ((40, 40, 40, 40), 1)])
def test_prompts_are_named_by_sizes_alone(
    sizes: tuple[int, ...],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A classifier that cannot tell them fails, because it shows nothing of what hides them."""
    monkeypatch.setattr("bench.eavesdropper.NUM_TREES", 20)
    monkeypatch.setattr("bench.side_channel.record", lambda options: _traces(dict(enumerate(sizes))))
    assert main(["--prompts", "4", "--train", "5", "--test", "3"]) == code
    printed = capsys.readouterr().out
    assert ("100.0%" in printed.split("as it is")[1].splitlines()[0]) == (code == 0)


def test_padding_leaves_times_only() -> None:
    """One size per direction, the greatest, and one opening."""
    before = [trace for trace in _traces({0: 40, 1: 90}) if not trace.is_steady]
    after = padded(before)
    assert {(read.is_up, read.num_bytes) for trace in after for read in trace.reads} == {(False, 91), (True, 91)}
    assert {trace.opening for trace in after} == {510}
    assert [[read.at_s for read in trace.reads] for trace in after] == [
        [read.at_s for read in trace.reads] for trace in before
    ]


def test_the_interval_holds_the_share() -> None:
    """Wilson's, as tables have it: 8 of 10 is 49 % to 94 %."""
    assert interval(0.8, 10) == pytest.approx((0.490, 0.943), abs=1e-3)
