"""Tests LoRA adapters by the name of a model, without vLLM: reading them, naming them, and what is kept apart.

The fake engine gives an adapter's requests the model's own text: what differs here is who the text is of.
`tests/vllm/test_lora.py` has their texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serving import (
    FakeServer,
    Transcript,
    code_of,
    run_session,
    serve_fake,
)

from outrider.cloud.api.state import NamedModel
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.serve import open_target
from outrider.models.errors import ConfigError
from outrider.models.wire.fields import MAX_MODEL_CHARS

ADAPTERS = {"sql": "5" * 16, "law/v2": "6" * 16}
PROMPT = [5, 17, 80, 12]


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
    named = {} if model is None else {"model": model}
    return run_session(client, {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | named | fields)


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_kind_of_request_names_an_adapter(cloud: FakeServer, client: httpx.Client) -> None:
    """The answer has the name and the identity; without a name both are the model's, and so they are by its own."""
    own = cloud.core.model.target
    facts = client.get("/v1/model").json()
    assert (facts["name"], facts["target"], facts["adapters"]) == ("fake", own, ADAPTERS)
    assert "adapters" not in client.get("/health/ready").json()  # anybody may ask there
    for model, target in [(None, own), ("fake", own), *ADAPTERS.items()]:
        named, name = ({}, "fake") if model is None else ({"model": model}, model)
        opened = session(client, model).open
        assert (opened.model, opened.target) == (name, target)
        verified = client.post("/v1/verify", json={"items": [{"prefix": PROMPT}], **named}).json()
        assert (verified["model"], verified["target"]) == (name, target)
        messages = [{"role": "user", "content": "Hi"}]
        rendered = client.post("/v1/render", json={"messages": messages, **named}).json()
        assert (rendered["model"], rendered["target"]) == (name, target)
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": messages})):
            answer = client.post(f"/v1/{path}", json=body | named | {"max_tokens": 2}).json()
            assert (answer["model"], answer["system_fingerprint"]) == (name, target)
    listed = client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in listed] == [
        ("fake", None),
        ("sql", "fake"),
        ("law/v2", "fake"),
    ]
    assert client.get("/v1/models/law/v2").json() == listed[2]


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
    for name in ("SQL", "sql ", "../sql", "/etc", "fake=sql", "\x00sql", "x" * MAX_MODEL_CHARS):
        answer = client.post(path, json=BODIES[path] | {"model": name})
        assert code_of(answer) == (404, "model_not_found") and answer.json()["error"]["param"] == "model"
        assert name not in answer.json()["error"]["message"]
    for wrong in (5, True, ["sql"], {"sql": 1}):
        assert code_of(client.post(path, json=BODIES[path] | {"model": wrong})) == (400, "invalid_parameter")
    for name in ("x" * (MAX_MODEL_CHARS + 1), "x" * 900_000, ""):
        answer = client.post(path, json=BODIES[path] | {"model": name})
        expected = (400, "invalid_parameter") if is_wire else (404, "model_not_found")
        assert (answer.status_code == 200) if not (name or is_wire) else (code_of(answer) == expected)
        assert len(answer.content) < 4096
    assert code_of(client.get("/v1/models/other")) == (404, "model_not_found")


def test_a_server_without_adapters_has_none() -> None:
    """The embedded engine's: any name but the model's own is refused."""
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/model").json()["adapters"] == {}
        assert code_of(client.post("/v1/sessions", json=BODIES["/v1/sessions"] | {"model": "sql"}))[0] == 404
        assert session(client, "fake").open.model == "fake"
        assert "outrider_adapter" not in client.get("/metrics").text


def test_the_command_line_refuses_them_where_they_have_no_effect(tmp_path: Path) -> None:
    """By name: with the embedded engine, and in front of another verifier."""
    with pytest.raises(ConfigError, match=r"--lora is for --engine vllm"):
        open_target(ServeOptions("reference", lora=[f"a={tmp_path}"]))
    with pytest.raises(ConfigError, match=r"--lora has no effect on the upstream"):
        open_target(ServeOptions("b", engine=EngineName.VLLM, lora=["a=b"], upstream="http://127.0.0.1:1"))


# -- what is kept apart ------------------------------------------------------------------------------------------------


def test_a_kept_prefix_is_of_use_to_its_model_only(client: httpx.Client) -> None:
    """Sessions and verifications; the hash stays good for the model that it is of."""
    models = (None, "sql", "law/v2")
    for model in models:
        kept = session(client, model, keep_prefix=True, prompt=[*PROMPT, len(model or "")])
        held = {"prefix_hash": kept.end.prefix_hash, "prompt": [7], "max_tokens": 3}
        item = {"prefix": [9, *PROMPT, len(model or "")]}
        named = {} if model is None else {"model": model}
        result = client.post("/v1/verify", json={"items": [item], **named}).json()["results"][0]
        again = {"items": [{"prefix_hash": result["prefix_hash"]}]}
        for other in models:
            if other != model:
                wrong = {} if other is None else {"model": other}
                assert code_of(client.post("/v1/sessions", json=held | wrong)) == (409, "prefix_not_held")
                assert code_of(client.post("/v1/verify", json=again | wrong)) == (409, "prefix_not_held")
        assert session(client, model, **held).end.usage.cached_prompt_tokens > 0
        assert client.post("/v1/verify", json=again | named).status_code == 200


def test_nothing_cached_is_shared_between_models(client: httpx.Client) -> None:
    """Of a prompt's keys and values, in the embedded engine too."""
    prompt = [1 + at % 200 for at in range(80)]
    cached = [session(client, model, prompt=prompt).end.usage.cached_prompt_tokens for model in (None, "sql", "law/v2")]
    assert cached == [0, 0, 0]
    assert all(session(client, m, prompt=prompt).end.usage.cached_prompt_tokens for m in (None, "sql", "law/v2"))


def test_an_earlier_text_drafts_for_its_model_only() -> None:
    """Recent texts, by adapter; also beside a client's own salt."""
    with (
        closing(MemoryStore()) as store,
        serve_fake(recent=store, adapters=ADAPTERS) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for salt in ({}, {"cache_salt": "a"}):
            for model in (None, "sql", "law/v2"):
                assert session(client, model, **salt).open.recent_tokens is None
            for model in (None, "sql", "law/v2"):
                assert session(client, model, **salt).open.recent_tokens == 12


def test_no_salt_of_a_client_is_an_adapters() -> None:
    """Whatever a client sends is UTF-8; an adapter's begins with a byte that is not."""
    base, sql = NamedModel("fake", "0" * 16), NamedModel("sql", "5" * 16, "sql")
    other = NamedModel("law", "6" * 16, "law")
    salts = ["", "a", "5" * 16, "\ud7ff\xff", "\xff" + "5" * 16, "5" * 16 + "a"]
    askers = [model.asker(b"owner", salt) for model in (base, sql, other) for salt in salts]
    assert len({asker.salt for asker in askers}) == len({asker.client for asker in askers}) == len(askers)
    assert len({asker.name_of("h") for asker in askers}) == len(askers)
    assert base.asker(b"owner").salt == b"" and base.asker(b"owner", None) == base.asker(b"owner", "")
    assert all(asker.owner == b"owner" for asker in askers)
