"""Tests drafts whose device fails: left in mid-text and tried again, handed to other texts, eased on battery."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from tests.agents import SAMPLED, SURE, Clock
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import DRAFTS, LocalEndpoint, expected, serve_local
from tests.serving import TURNS_TEMPLATE, StepGate, fake_tokenizer, serve_fake, target_tokens
from tests.test_edge_terminal import chat

from outrider.edge.devices.placement import Placement
from outrider.edge.devices.power import OnBattery, PowerWatch, why_ease
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.drafter import ModelDrafter, NgramDrafter
from outrider.edge.drafting.ladder import LadderDrafter, Rung
from outrider.edge.drafting.scheduler import THREAD_NAME
from outrider.edge.modes.assemble import OpenModel, eased, make_depth, make_options
from outrider.edge.modes.draft_ladder import LazyModel, open_ladder
from outrider.edge.serve.lent_drafts import DraftSequences
from outrider.models.breaker import Breaker
from outrider.models.errors import ModelFault


class Failing(FakeSequenceRuntime):
    """A draft whose device fails while `fails` is set."""

    def __init__(self, agreement: float = 1.0) -> None:
        self.fails, self.calls = threading.Event(), 0
        super().__init__(vocab_size=fake_tokenizer().size, agreement=agreement, on_step=self._step)

    def _step(self, tokens: Sequence[int]) -> None:
        self.calls += 1
        if self.fails.is_set():
            raise ModelFault("the device is gone")


def model_of(runtime: FakeSequenceRuntime) -> OpenModel:
    return OpenModel(runtime, None, Placement("openvino"))


class Loaded(list[Failing]):
    """The models that `load` has loaded."""

    def load(self) -> OpenModel:
        self.append(Failing())
        return model_of(self[-1])


def refuse() -> OpenModel:
    raise ModelFault("it does not fit")


def test_a_ladder_steps_down_in_mid_text_and_climbs_again_after_a_pause() -> None:
    """NPU, GPU, CPU, lookup: each takes over with the whole text, so its guesses are those of a draft of its own."""
    clock, words = Clock(), list[str]()
    runtimes = [Failing() for _ in range(3)]
    rungs = [
        Rung(name, lambda runtime=runtime: ModelDrafter(runtime), Breaker(1.0, clock=clock))  # type: ignore[misc]
        for name, runtime in zip(("the NPU", "the GPU", "the CPU"), runtimes, strict=True)
    ]
    ladder = LadderDrafter([*rungs, Rung("lookup", NgramDrafter)], words.append)
    prompt = [5, 6, 7, 8, 5, 6, 7]
    ladder.begin(prompt, SAMPLED)
    first, second, third, fourth, fifth, sixth, *_ = target_tokens(prompt, 8, SAMPLED)

    def guess() -> int:
        (guesses,) = ladder.guess([[]], 1)
        return guesses[0].token

    for runtime, token in zip([None, *runtimes[:2]], (first, second, third), strict=True):
        if runtime is not None:
            runtime.fails.set()
        assert guess() == token
        ladder.extend([token])
    assert all(runtime.calls > 0 for runtime in runtimes) and len(words) == 2
    assert words[0] == "the NPU failed (ModelFault: the device is gone); drafting goes on with the GPU"
    runtimes[2].fails.set()
    assert ladder.continuation(2) == [] and ladder.guess([[]], 1) is not None  # lookup has what it has
    assert "goes on with lookup" in words[-1] and ladder.model_drafter is None
    for each in runtimes[:2]:
        each.fails.clear()
    ladder.extend([fourth])
    calls = [runtime.calls for runtime in runtimes]
    ladder.guess([[]], 1)
    assert [runtime.calls for runtime in runtimes] == calls  # all pause
    clock.now = 1.0
    ladder.extend([fifth])
    assert guess() == sixth and "the NPU is tried again" in words[-1]
    assert ladder.length == len(prompt) + 5 and ladder.failed == {0, 1, 2}
    ladder.close()
    assert all(runtime.is_closed for runtime in runtimes)


def test_where_no_rung_is_left_the_last_failure_is_reported() -> None:
    """So the text goes on without drafts, and says why."""
    broken = Failing()
    broken.fails.set()
    ladder = LadderDrafter([Rung("the CPU", lambda: ModelDrafter(broken), Breaker())])
    ladder.begin([1, 2], SAMPLED)
    with pytest.raises(ModelFault, match="gone"):
        ladder.guess([[]], 1)
    with pytest.raises(RuntimeError, match="failed a moment ago"):
        ladder.begin([1, 2], SAMPLED)


def test_a_draft_whose_device_was_lost_is_loaded_anew_once_its_trial_has_failed() -> None:
    """After sleep or a driver's reset the same object works no more."""
    loaded = Loaded()
    drafter = open_ladder([LazyModel("the NPU", refuse), LazyModel("the GPU", loaded.load)], is_asked=False).drafter
    assert isinstance(drafter, LadderDrafter)
    loaded[0].fails.set()
    breaker = drafter._rungs[0].breaker
    for num_loaded in (1, 1, 2):
        breaker._due_at = 0.0
        drafter.begin([5, 6, 7, 8], SAMPLED)
        drafter.guess([[]], 1)
        assert len(loaded) == num_loaded
    assert loaded[0].is_closed and loaded[1].calls > 0 and not breaker.is_open
    drafter.close()
    assert loaded[1].is_closed


@pytest.mark.parametrize("is_shared", [False, True])
def test_serve_loads_a_lost_draft_anew_once_no_text_has_it(is_shared: bool) -> None:
    """A text that has a sequence of it keeps it in memory; others wait meanwhile."""
    loaded, prompt = Loaded(), [5, 6, 7, 8]
    drafts = DraftSequences(loaded.load(), 2, is_looked_up=True, again=loaded.load)
    pauses = drafts._pools[0].breaker
    pauses._first_pause_s = pauses._max_pause_s = 1e9

    def has_model() -> bool:
        pauses._due_at = 0.0
        with drafts.lend(b"", prompt) as loan:
            assert loan.drafter is not None
            drafts.scheduler.join()
            loan.drafter.begin(prompt, SAMPLED)
            loan.drafter.guess([[]], 1)
            drafts.scheduler.join()
            return loan.drafter.model_drafter is not None

    with ExitStack() as other:
        if is_shared:
            other.enter_context(drafts.lend(b"other", prompt))
        loaded[0].fails.set()
        assert not has_model() and not loaded[0].is_closed
        assert not has_model() and loaded[0].is_closed != is_shared
        assert not is_shared or not has_model()
    drafts.scheduler.join()
    assert loaded[0].is_closed and len(loaded) == 1
    assert has_model() and len(loaded) == 2 and not drafts.failed and drafts.num_lent == 0
    drafts.close()
    assert loaded[1].is_closed


def write(local: LocalEndpoint) -> None:
    """A text of the target; returns once nothing is left of it."""
    assert local.text() == expected()
    local.wait_until(local.is_at_rest)
    local.core.drafts.scheduler.join()


def test_serve_goes_on_with_the_next_model_in_mid_text() -> None:
    """Two texts share a model that fails: both go on with the other, which is loaded only then; a later one returns."""
    first, loaded, gate = Failing(), Loaded(), StepGate()
    others = [LazyModel("another draft", loaded.load)]

    def num_failed() -> int:
        return len(httpx.get(f"{local.url}/health/ready", timeout=30.0).json()["failed_drafts"])

    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=first, others=others, draft_pause_s=0.0) as local,
    ):
        pauses = local.core.drafts._pools[0].breaker
        pauses._first_pause_s = pauses._max_pause_s = 1e9
        assert not loaded
        first.fails.set()
        gate.open()
        for _ in range(2):
            write(local)
        assert len(loaded) == num_failed() == 1 and loaded[0].length > 0
        first.fails.clear()
        pauses._due_at = 0.0
        calls = first.calls
        write(local)
        assert first.calls > calls and num_failed() == 0


def test_only_the_drafting_thread_loads_a_model_and_a_failed_load_costs_no_text() -> None:
    """A text that begins while the first model pauses waits for the other: the event loop never loads it."""
    first, loaders = Failing(), list[str]()

    def load() -> OpenModel:
        loaders.append(threading.current_thread().name)
        return refuse()

    with (
        serve_fake(config=SURE) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=first, others=[LazyModel("another draft", load)]) as local,
    ):
        pauses = local.core.drafts._pools[0].breaker
        pauses._first_pause_s = pauses._max_pause_s = 1e9
        pauses.failed()
        write(local)
        assert set(loaders) == {THREAD_NAME} and first.calls == 0


def test_a_model_that_is_not_loaded_yet_may_write_a_text_alone() -> None:
    """Without lookup, and while the first model pauses: it is loaded when the text begins to draft."""
    others = [LazyModel("another draft", Loaded().load)]
    drafts = DraftSequences(model_of(Failing()), 1, is_looked_up=False, others=others)
    drafts._pools[0].breaker.failed()
    with drafts.lend(b"", [5, 6, 7, 8]) as loan:
        assert loan.can_write and drafts.num_lent == 0 and loan.drafter is not None
        loan.drafter.begin([5, 6, 7, 8], SAMPLED)
        assert drafts.num_lent == 1
    drafts.close()


def test_a_rung_without_room_is_asked_again_at_each_commit() -> None:
    """It takes over with the whole text. While it has no room, the trial after its failure is left to others."""
    clock, prompt, rooms = Clock(), [5, 6, 7, 8], [False]
    breaker, text = Breaker(1.0, clock=clock), target_tokens(prompt, 4, SAMPLED)
    rung = Rung("the NPU", lambda: ModelDrafter(Failing()) if rooms[0] else None, breaker)
    ladder = LadderDrafter([rung, Rung("lookup", NgramDrafter)], lambda words: pytest.fail(words))
    ladder.begin(prompt, SAMPLED)
    breaker.failed()
    clock.now = 1.0
    ladder.extend(text[:1])
    assert ladder.model_drafter is None and breaker.allows()  # the trial
    breaker.failed()
    rooms[0] = True
    ladder.extend(text[1:2])
    assert ladder.model_drafter is None  # it pauses
    clock.now = 10.0
    ladder.extend(text[2:3])
    assert ladder.model_drafter is not None and ladder.guess([[]], 1)[0][0].token == text[3] and not breaker.is_open


@pytest.mark.parametrize("is_looked_up", [True, False])
def test_the_text_that_has_waited_longest_takes_over_a_free_sequence(is_looked_up: bool) -> None:
    """At its next commit; those that came later, and new ones, wait for the next."""
    drafts, prompt = DraftSequences(model_of(Failing()), 1, is_looked_up=is_looked_up), [5, 6, 7, 8]
    text = target_tokens(prompt, 3, SAMPLED)

    def begin(owner: bytes) -> tuple[ExitStack, LadderDrafter]:
        stack = ExitStack()
        loan = stack.enter_context(drafts.lend(owner, prompt))
        assert isinstance(loan.drafter, LadderDrafter) and loan.can_write == (is_looked_up or owner == b"first")
        drafts.scheduler.join()
        loan.drafter.begin(prompt, SAMPLED)
        loan.text = prompt
        return stack, loan.drafter

    stacks, ladders = zip(*(begin(owner) for owner in (b"first", b"second", b"third")), strict=True)
    for new in ([], text[:1]):
        for ladder in ladders:
            ladder.extend(new)
        assert [ladder.model_drafter is not None for ladder in ladders] == [True, False, False]
    stacks[0].close()
    last_stack, last = begin(b"fourth")
    ladders[2].extend(text[1:2])
    assert drafts.num_lent == 0 and ladders[2].model_drafter is None and last.model_drafter is None
    ladders[1].extend(text[1:2])
    assert drafts.num_lent == 1 and ladders[1].guess([[]], 1)[0][0].token == text[2]
    ladders[2].extend(text[2:3])
    assert ladders[2].model_drafter is None
    stacks[2].close()  # it waits no longer
    stacks[1].close()
    drafts.scheduler.join()
    last.extend(text[:2])
    assert last.guess([[]], 1)[0][0].token == text[2]
    last_stack.close()
    drafts.close()
    assert drafts.num_lent == 0


@pytest.mark.parametrize(
    ("battery", "sensors", "reason"),
    [
        (None, {}, None),
        ((True, 20), {}, None),
        ((None, 20), {}, None),
        ((False, 41.6), {}, "on battery, 42 %"),
        (None, {"coretemp": [(97.0, 100.0)]}, "hot, 97 °C"),
        (None, {"coretemp": [(84.0, 80.0)]}, "hot, 84 °C"),
        (None, {"coretemp": [(60.0, None)], "nvme": [(99.0, 80.0)]}, None),
    ],
)
def test_on_battery_or_hot_is_a_reason_to_draft_less(
    battery: tuple[bool | None, float] | None, sensors: dict[str, list[tuple[float, float | None]]], reason: str | None
) -> None:
    state = battery and SimpleNamespace(power_plugged=battery[0], percent=battery[1])
    found = {
        name: [SimpleNamespace(current=current, high=high) for current, high in each] for name, each in sensors.items()
    }
    assert why_ease(lambda: state, lambda: found) == reason
    assert why_ease(Mock(side_effect=OSError("no sensor")), Mock(side_effect=OSError("no sensor"))) is None


def test_a_chat_looks_at_the_battery_before_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve` does before each text: it may last for hours."""
    found = iter([None, "on battery, 40 %", "on battery, 39 %", None])
    clock = Mock(side_effect=range(0, 9999, 31))
    monkeypatch.setattr(PowerWatch.__init__, "__defaults__", (OnBattery.HALF, lambda: next(found), clock))
    monkeypatch.setattr("outrider.edge.cli.chat.make_depth", depths := Mock(side_effect=make_depth))
    with serve_fake(chat_template=TURNS_TEMPLATE) as server:
        shown = chat(server.url, "one", "two", "three", "four", on_battery=OnBattery.HALF)
    assert shown.about.count("half the work: on battery, 40 %") == shown.about.count("all the work again") == 1
    assert [call.args[2] for call in depths.call_args_list] == [Effort.LOW, Effort.NORMAL]
    assert shown.conversation.agent.options == make_options() and next(found, "all asked") == "all asked"


def test_half_the_work_is_low_effort_half_the_nodes_and_half_the_bytes() -> None:
    """--on-battery full asks no sensor; the state is believed for half a minute."""
    options, clock, ask = make_options(), Clock(), Mock(return_value="on battery")
    half = eased(options)
    assert half.effort is Effort.LOW and half.bytes_per_token == options.bytes_per_token / 2
    assert half.tree.max_nodes == options.tree.max_nodes // 2 and half.tree.width == options.tree.width
    watch = PowerWatch(OnBattery.HALF, ask, clock)
    assert watch.reason == watch.reason == "on battery" and ask.call_count == 1
    clock.now = 31.0
    assert watch.reason == "on battery" and ask.call_count == 2
    assert PowerWatch(OnBattery.FULL, lambda: pytest.fail("asked"), clock).reason is None
