"""Tests where drafts run: chosen by measured times, left when they fail and tried again, eased on battery."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import fake_draft, serve_local
from tests.serving import StepGate, fake_tokenizer, serve_fake, target_tokens
from tests.test_edge_devices import CPU_ONLY, manifest_for
from tests.test_edge_serve import DRAFTS, SURE, body, expected

from outrider.edge.cli.draft_source import place_drafts
from outrider.edge.cli.placing import Ranked, placed_words, rank
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, Placement
from outrider.edge.devices.power import OnBattery, PowerWatch, why_ease
from outrider.edge.devices.profiles import Forecast, Link, Load, Profile, Profiles
from outrider.edge.doctor.probe import ProbeFailed
from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.depth import CostModelDepth, Effort
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.ladder import LadderDrafter, Rung
from outrider.edge.drafting.turns import Turns
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import OpenModel, eased, make_options
from outrider.edge.modes.draft_ladder import LazyModel, candidates_of
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.edge.serve.lent_drafts import DraftSequences
from outrider.models.breaker import Breaker
from outrider.models.bundle.bundle import Bundle
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ConfigError, ModelFault, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan

ORT = FoundRuntime("onnxruntime", "1.2", (FoundDevice("CPUExecutionProvider", "Some Processor", "cpu"),))
ALL = FoundRuntime(
    "openvino",
    "2026.1",
    tuple(FoundDevice(name, f"Some {name}", kind) for name, kind in (("CPU", "cpu"), ("GPU", "gpu"), ("NPU", "npu"))),  # type: ignore[arg-type]
)
PARAMS = SamplingParams(0.8, seed=3)
CALM = Load()
PASSAGE = 64


def found(openvino: FoundRuntime = CPU_ONLY) -> Any:
    return lambda runtime: openvino if runtime == "openvino" else ORT


def bundle(name: str, runtime: str, device: str, tokenizer: str = "0" * 64) -> Bundle:
    """What placement asks of a bundle."""
    manifest = manifest_for(runtime, device, device.upper())
    manifest = manifest.model_copy(update={"name": name, "tokenizer_fingerprint": tokenizer})
    return SimpleNamespace(manifest=manifest, path=Path(f"/{name}"))  # type: ignore[return-value]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a processor only, in both runtimes."""
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found())


def profiles_of(times: dict[str, tuple[float, float]], asked: list[str] | None = None) -> Any:
    def measure(path: str, choice: DraftChoice, num_threads: int) -> Profile:
        key = f"{Path(path).name}{f' {choice.device}' if choice.device else ''}"
        if asked is not None:
            asked.append(key)
        if key not in times:
            raise ProbeFailed(f"{key} crashed")
        one_ms, eight_ms = times[key]
        return Profile(calls_ms={1: one_ms, 8: eight_ms})

    return measure


def names(ranked: Sequence[Ranked]) -> list[str]:
    return [f"{each.candidate.bundle.manifest.name} {each.candidate.placement.device}" for each in ranked]


@pytest.mark.usefixtures("here")
def test_the_faster_runtime_drafts_and_its_profile_is_kept(tmp_path: Path) -> None:
    """Of two drafts for the processor: measured once, whichever is named first; another version measures again."""
    drafts = [bundle("slow", "openvino", "cpu"), bundle("quick", "onnxruntime", "cpu")]
    candidates = candidates_of(drafts, AS_BUNDLED, found())
    assert [each.placement.runtime for each in candidates] == ["openvino", "onnxruntime"]
    asked: list[str] = []
    measure, store = profiles_of({"slow": (0.6, 2.0), "quick": (0.25, 2.0)}, asked), Profiles(tmp_path)

    def ranked(runtimes: Any = None) -> list[str]:
        return names(rank(candidates, 0, None, store, measure, lambda: CALM, runtimes or found()))

    assert ranked() == ranked() == ["quick cpu", "slow cpu"] and asked == ["slow", "quick"]
    newer = FoundRuntime("openvino", "2", CPU_ONLY.devices)
    assert ranked(found(newer)) == ["quick cpu", "slow cpu"] and asked == ["slow", "quick", "slow"]
    best = rank(candidates, 0, None, store, measure, lambda: CALM, found())
    words = placed_words(best).split("; ")
    assert words[0].startswith("quick (int8, ONNX Runtime on the CPU): ") and "slow (" in words[1]


@pytest.mark.usefixtures("here")
def test_times_of_a_busy_processor_are_not_kept(tmp_path: Path) -> None:
    """They are used once; what cannot be profiled comes last and says why."""
    drafts = [bundle("broken", "openvino", "cpu"), bundle("quick", "onnxruntime", "cpu")]
    asked: list[str] = []
    measure = profiles_of({"quick": (0.25, 2.0)}, asked)
    candidates = candidates_of(drafts, AS_BUNDLED, found())
    for _ in range(2):
        ranked = rank(candidates, 0, None, Profiles(tmp_path), measure, lambda: Load(0.9), found())
        assert names(ranked) == ["quick cpu", "broken cpu"] and ranked[1].error == "broken crashed"
        assert ranked[0].load == CALM  # the times have the load in them
    assert asked == ["broken", "quick"] * 2


def test_no_kind_of_device_wins_unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NPU, GPU and processor by their times; a draft for an NPU runs nowhere else."""
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found(ALL))
    drafts = [bundle("npu", "openvino", "npu"), bundle("cpu", "openvino", "cpu")]
    candidates = candidates_of(drafts, AS_BUNDLED, found(ALL))
    assert [(each.bundle.manifest.name, each.placement.device) for each in candidates] == [
        ("npu", "npu"),
        ("cpu", "cpu"),
        ("cpu", "gpu"),
    ]
    times = {"npu": (5.0, 40.0), "cpu": (2.0, 6.0), "cpu gpu": (3.0, 3.5)}

    def order(link: Link | None = None, load: Load = CALM) -> list[str]:
        return names(rank(candidates, 0, link, Profiles(tmp_path), profiles_of(times), lambda: load, found(ALL)))

    assert order(Link(1.0, 40.0)) == ["cpu gpu", "cpu cpu", "npu npu"]  # eight nodes in a call count more than 1 ms
    assert order(Link(1.0, 5.0)) == ["cpu cpu", "cpu gpu", "npu npu"]
    assert order(Link(1.0, 40.0), Load(0.95)) == ["cpu gpu", "npu npu", "cpu cpu"]
    times.update(npu=(0.2, 1.6))
    assert order() != []  # kept from before
    fresh = Profiles(tmp_path / "fresh")
    assert names(rank(candidates, 0, None, fresh, profiles_of(times), lambda: CALM, found(ALL)))[0] == "npu npu"


@pytest.mark.usefixtures("here")
def test_where_no_draft_pays_the_quickest_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their speeds differ by rounding errors only."""

    def expect(profile: Profile, *given: object) -> Forecast:
        return Forecast(100.00000000000004 if profile.token_ms == 600.0 else 100.0, 1, profile.token_ms, 10.0, 0.0)

    monkeypatch.setattr("outrider.edge.cli.placing.forecast", expect)
    drafts = [bundle("slow", "openvino", "cpu"), bundle("quick", "onnxruntime", "cpu")]
    candidates = candidates_of(drafts, AS_BUNDLED, found())
    measure = profiles_of({"slow": (600.0, 4800.0), "quick": (500.0, 4000.0)})
    ranked = rank(candidates, 0, None, Profiles(tmp_path), measure, lambda: CALM, found())
    assert names(ranked) == ["quick cpu", "slow cpu"]


@pytest.mark.usefixtures("here")
def test_drafts_of_different_targets_do_not_compete() -> None:
    with pytest.raises(ConfigError, match="different tokenizers"):
        candidates_of([bundle("a", "openvino", "cpu"), bundle("b", "openvino", "cpu", "1" * 64)], AS_BUNDLED, found())
    with pytest.raises(RuntimeUnavailable):
        candidates_of([bundle("a", "openvino", "npu")], AS_BUNDLED, found())
    ngram = candidates_of([bundle("a", "openvino", "cpu")], DraftChoice("ngram"), found())
    assert [each.placement.runtime for each in ngram] == ["ngram"]


def test_a_named_device_comes_first_whatever_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others follow for the case that it fails; one candidate is not profiled."""
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found(ALL))
    monkeypatch.setattr("outrider.edge.modes.draft_ladder.find_runtime", found(ALL))
    monkeypatch.setattr("outrider.edge.cli.draft_source.rank", lambda *given: pytest.fail("it was profiled"))
    monkeypatch.setattr(candidates_of, "__defaults__", (found(ALL),))
    placed = place_drafts([bundle("cpu", "openvino", "cpu")], DraftChoice(device="gpu"), 0, [], None)  # type: ignore[arg-type]
    assert [each.placement.device for each in placed] == ["gpu", "cpu"]


class Failing(FakeSequenceRuntime):
    """A draft whose device fails while `fails` is set."""

    def __init__(self, agreement: float = 1.0) -> None:
        self.fails, self.calls = threading.Event(), 0
        super().__init__(vocab_size=fake_tokenizer().size, agreement=agreement, on_step=self._step)

    def _step(self, tokens: Sequence[int]) -> None:
        self.calls += 1
        if self.fails.is_set():
            raise ModelFault("the device is gone")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
    ladder.begin(prompt, PARAMS)
    text = target_tokens(prompt, 8, PARAMS)
    done = 0

    def guess() -> int:
        (guesses,) = ladder.guess([[]], 1)
        return guesses[0].token

    for failing in [None, 0, 1]:
        if failing is not None:
            runtimes[failing].fails.set()
        assert guess() == text[done]
        ladder.extend(text[done : done + 1])
        done += 1
    assert [runtime.calls > 0 for runtime in runtimes] == [True] * 3 and len(words) == 2
    assert words[0] == "the NPU failed (ModelFault: the device is gone); drafting goes on with the GPU"
    runtimes[2].fails.set()
    assert ladder.continuation(2) == [] and ladder.guess([[]], 1) is not None  # lookup has what it has
    assert "goes on with lookup" in words[-1] and ladder.model_drafter is None
    for runtime in runtimes[:2]:
        runtime.fails.clear()
    ladder.extend(text[done : done + 1])
    done += 1
    calls = [runtime.calls for runtime in runtimes]
    ladder.guess([[]], 1)
    assert [runtime.calls for runtime in runtimes] == calls  # all pause
    clock.now = 1.0
    ladder.extend(text[done : done + 1])
    done += 1
    assert guess() == text[done] and "the NPU is tried again" in words[-1]
    assert ladder.length == len(prompt) + done and ladder.failed == {0, 1, 2}
    ladder.close()
    assert all(runtime.is_closed for runtime in runtimes)


def test_where_no_rung_is_left_the_last_failure_is_reported() -> None:
    """So the text goes on without drafts, and says why."""
    broken = Failing()
    broken.fails.set()
    ladder = LadderDrafter([Rung("the CPU", lambda: ModelDrafter(broken), Breaker())])
    ladder.begin([1, 2], PARAMS)
    with pytest.raises(ModelFault, match="gone"):
        ladder.guess([[]], 1)
    with pytest.raises(RuntimeError, match="failed a moment ago"):
        ladder.begin([1, 2], PARAMS)


def test_serve_goes_on_with_the_next_model_in_mid_text() -> None:
    """Two texts share a model that fails: both go on with the other, which is loaded only then; a later one returns."""
    first, second = Failing(), fake_draft(agreement=1.0)
    loaded: list[int] = []

    def load() -> OpenModel:
        loaded.append(1)
        return OpenModel(second, None, Placement("openvino"))

    gate = StepGate()
    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(
            cloud.url, DRAFTS, runtime=first, others=[LazyModel("another draft", load)], draft_pause_s=0.0
        ) as local,
        httpx.Client(base_url=local.url, timeout=30.0) as client,
    ):
        pauses = local.core.drafts._pools[0].breaker
        pauses._first_pause_s = pauses._max_pause_s = 1e9
        assert not loaded
        first.fails.set()
        gate.open()
        for _ in range(2):
            answer = client.post("/v1/completions", json=body()).json()
            assert answer["choices"][0]["text"] == expected()
            local.wait_until(local.is_at_rest)
        local.core.drafts.scheduler.join()
        assert loaded == [1] and second.length > 0
        ready = client.get("/health/ready").json()
        assert len(ready["failed_drafts"]) == 1
        first.fails.clear()
        pauses._due_at = 0.0
        calls = first.calls
        assert client.post("/v1/completions", json=body()).json()["choices"][0]["text"] == expected()
        local.wait_until(local.is_at_rest)
        local.core.drafts.scheduler.join()
        assert first.calls > calls and client.get("/health/ready").json()["failed_drafts"] == []


def test_a_rung_without_room_is_asked_again_at_each_commit() -> None:
    """It takes over with the whole text. While it has no room, the trial after its failure is left to others."""
    clock, words, rooms = Clock(), list[str](), [False]
    breaker = Breaker(1.0, clock=clock)
    rung = Rung("the NPU", lambda: ModelDrafter(fake_draft(agreement=1.0)) if rooms[0] else None, breaker)
    ladder = LadderDrafter([rung, Rung("lookup", NgramDrafter)], words.append)
    prompt = [5, 6, 7, 8]
    text = target_tokens(prompt, 4, PARAMS)
    ladder.begin(prompt, PARAMS)
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
    assert ladder.model_drafter is not None and ladder.guess([[]], 1)[0][0].token == text[3]
    assert words == [] and not breaker.is_open


@pytest.mark.parametrize("is_looked_up", [True, False])
def test_the_text_that_has_waited_longest_takes_over_a_free_sequence(is_looked_up: bool) -> None:
    """At its next commit; those that came later, and new ones, wait for the next."""
    model = OpenModel(fake_draft(agreement=1.0), None, Placement("openvino"))
    drafts = DraftSequences(model, 1, is_looked_up=is_looked_up)
    prompt = [5, 6, 7, 8]
    text = target_tokens(prompt, 3, PARAMS)

    def begin(owner: bytes) -> tuple[ExitStack, LadderDrafter]:
        stack = ExitStack()
        loan = stack.enter_context(drafts.lend(owner, prompt))
        assert isinstance(loan.drafter, LadderDrafter) and loan.can_write == (is_looked_up or owner == b"first")
        drafts.scheduler.join()
        loan.drafter.begin(prompt, PARAMS)
        loan.text = prompt
        return stack, loan.drafter

    stacks, ladders = zip(*(begin(owner) for owner in (b"first", b"second", b"third")), strict=True)
    assert [ladder.model_drafter is not None for ladder in ladders] == [True, False, False]
    for ladder in ladders:
        ladder.extend(text[:1])
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


def test_serve_gives_a_running_text_the_sequence_of_one_that_has_ended() -> None:
    """The text that began without a sequence drafts with the model from its next commit on."""
    gate = StepGate()
    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=fake_draft(agreement=1.0), max_sequences=1) as local,
        ThreadPoolExecutor(2) as pool,
    ):

        def ask(max_tokens: int) -> Future[httpx.Response]:
            return pool.submit(httpx.post, f"{local.url}/v1/completions", json=body(max_tokens), timeout=30.0)

        short = ask(2)
        local.wait_until(lambda: local.core.drafts.num_lent == 1)
        long = ask(40)
        local.wait_until(lambda: len(cloud.core.sessions) == 2)
        while not short.done():
            gate.allow(1)
            cloud.wait_until(lambda: gate._allowed == 0 or short.done())
        local.wait_until(lambda: local.core.places.total == 1)  # the short one has given everything back
        gate.allow(1)
        local.wait_until(lambda: local.core.drafts.num_lent == 1)
        gate.open()
        assert long.result(30.0).json()["choices"][0]["text"] == expected(count=40)
        local.wait_until(local.is_at_rest)


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
    state = SimpleNamespace(power_plugged=battery[0], percent=battery[1]) if battery is not None else None
    found = {
        name: [SimpleNamespace(current=current, high=high) for current, high in each] for name, each in sensors.items()
    }
    assert why_ease(lambda: state, lambda: found) == reason

    def broken() -> Any:
        raise OSError("no sensor")

    assert why_ease(broken, broken) is None


def test_half_the_work_is_low_effort_half_the_nodes_and_half_the_bytes() -> None:
    """--on-battery full asks no sensor; the state is believed for half a minute."""
    options = make_options()
    half = eased(options)
    assert half.effort is Effort.LOW and half.bytes_per_token == options.bytes_per_token / 2
    assert half.tree.max_nodes == options.tree.max_nodes // 2 and half.tree.width == options.tree.width
    clock, asked = Clock(), list[int]()

    def ask() -> str:
        asked.append(1)
        return "on battery"

    watch = PowerWatch(OnBattery.HALF, ask, clock)
    assert watch.reason == watch.reason == "on battery" and len(asked) == 1
    clock.now = 31.0
    assert watch.reason == "on battery" and len(asked) == 2
    assert PowerWatch(OnBattery.FULL, lambda: pytest.fail("asked"), clock).reason is None


class Mixed(Drafter):
    """A draft of the fake language that agrees in every other passage, and hardly in between."""

    def __init__(self) -> None:
        self.easy = ModelDrafter(fake_draft(agreement=1.0))
        self.hard = ModelDrafter(fake_draft(agreement=0.05))

    def _now(self) -> ModelDrafter:
        return self.easy if self.easy.length // PASSAGE % 2 == 0 else self.hard

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        self.easy.begin(prompt, params, plan)
        self.hard.begin(prompt, params, plan)

    def extend(self, tokens: Sequence[int]) -> None:
        self.easy.extend(tokens)
        self.hard.extend(tokens)

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[Any]:
        return list(self._now().guess(branches, width))

    def continuation(self, max_tokens: int) -> list[Any]:
        return []

    def read_on(self) -> None:
        self._now().read_on()

    @property
    def length(self) -> int:
        return self.easy.length

    @property
    def max_branches(self) -> int:
        return 8

    @property
    def is_behind(self) -> bool:
        return self._now().is_behind


class Steady(CostModelDepth):
    """The cost model with times that do not depend on this machine. plans: tokens known, and the depth from there."""

    def __init__(self, estimates: Estimates) -> None:
        fixed: dict[str, object] = {"step_ms": 20.0, "extra_ms": 0.5, "round_trip_ms": 40.0, "draft_ms": 1.0}
        fixed |= {"interval_ms": None, "turns": Turns()}
        steady = type("SteadyEstimates", (), {**fixed, "acceptance": property(lambda self: estimates.acceptance)})
        super().__init__(steady())
        self.num_known = 0
        self.plans: list[tuple[int, int]] = []

    def observe(self, outcome: CommitOutcome) -> None:
        super().observe(outcome)
        self.num_known += len(outcome.tokens)
        self.plans.append((self.num_known, 0 if self.plan().silent else self.plan().depth))


def test_easy_passages_run_deep_and_hard_ones_shallow() -> None:
    """The controller's depth, averaged over the second halves of both kinds of passages of one text."""
    prompt, count = [1] * PASSAGE, 4 * PASSAGE
    estimates = Estimates()
    depth = Steady(estimates)

    async def generate() -> GenerationResult:
        with serve_fake(config=SURE) as cloud:
            async with VerifierClient(cloud.url) as client:
                # In stop-and-wait all that is drafted is tested, whatever the times of this machine are.
                agent = StopAndWaitAgent(Endpoints([client]), Mixed(), depth, estimates)
                return await agent.generate(GenerationRequest(tuple(prompt), PARAMS, count, ignore_eos=True))

    result = asyncio.run(asyncio.wait_for(generate(), 60.0))
    assert list(result.tokens) == target_tokens(prompt, count, PARAMS)
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for num_known, chosen in depth.plans:
        position = len(prompt) + num_known
        if position % PASSAGE >= PASSAGE // 2:  # the controller has seen what passage it is
            kinds[position // PASSAGE % 2 == 0].append(chosen)
    easy, hard = (sum(each) / len(each) for each in (kinds[True], kinds[False]))
    assert easy > 2 * hard, (easy, hard)


def test_devices_profile_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of given drafts, the best first; as JSON too; without --profile the options are refused."""
    from tests.test_edge_serve import run_main

    drafts = {"slow": bundle("slow", "openvino", "cpu"), "quick": bundle("quick", "onnxruntime", "cpu")}
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found())
    monkeypatch.setattr("outrider.edge.cli.placing.open_draft_bundle", lambda path: drafts[path.name])
    measured = {"slow": (0.6, 2.0), "quick": (0.25, 2.0)}
    monkeypatch.setattr("outrider.edge.cli.placing.profile_draft", profiles_of(measured))
    given = ["--draft", "slow", "--draft", "quick"]
    assert run_main(monkeypatch, "devices", "--profile", *given, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["profiles"]
    assert [(each["draft"], each["calls_ms"]) for each in rows] == [
        ("quick", {"1": 0.25, "8": 2.0}),
        ("slow", {"1": 0.6, "8": 2.0}),
    ]
    assert rows[0]["tokens_per_s"] >= rows[1]["tokens_per_s"] > 0.0
    monkeypatch.setenv("COLUMNS", "200")
    assert run_main(monkeypatch, "devices", "--profile", *given) == 0
    shown = capsys.readouterr().out
    assert shown.index("quick") < shown.index("slow") and "ms/8" in shown and "ms/16" not in shown
    assert "energy: not shown, " in shown or "nodes/J: " in shown
    assert run_main(monkeypatch, "devices", *given) == 2
    assert "add --profile" in capsys.readouterr().err
