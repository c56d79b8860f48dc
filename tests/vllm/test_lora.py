"""LoRA adapters on vLLM: their texts are `pick` over transformers' logits with the products merged into the weights."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.lora_adapters import merge_adapter, shapes_of, write_adapter
from tests.requests import flat_request
from tests.serving import code_of, run_session, serve_app
from tests.vllm.gated import STEADY
from tests.vllm.serving import IS_CUDA, Reference, app_over, running_engine
from tests.vllm.test_equality import NUM_TOKENS, ROOT_DIR, SAMPLINGS, Guess, mixed, nothing, right, run_all, wrong
from tests.waiting import TIMEOUT_S

from outrider.cloud.api.state import ServedModel
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.vllm.adapters import Adapter, read_adapters
from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer

TARGET = ROOT_DIR / "target"


@dataclass(frozen=True)
class Tuned:
    """Two adapters of the reference target, an engine with them, and the reference of each; None: of the target."""

    engine: VllmEngine
    adapters: tuple[Adapter, ...]
    references: dict[str | None, Reference]
    prompts: list[tuple[int, ...]]

    def texts(self, prompts: Sequence[tuple[int, ...]], samplings: Sequence[SamplingParams]) -> list[Any]:
        """Adapter, prompt, parameters and text, of every combination."""
        return [
            (name, prompt, params, reference(prompt, NUM_TOKENS, params))
            for prompt in prompts
            for params in samplings
            for name, reference in self.references.items()
        ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """ "few": rank 4 on two kinds of layers. "all": on all of them, with other ranks for some, scaled as rsLoRA."""
    root, layers = tmp_path_factory.mktemp("lora"), shapes_of(TARGET)
    few = write_adapter(root / "few", layers, ("q_proj", "v_proj"), rank=4, alpha=8, seed=1, scale=0.1)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    patterns: dict[str, Any] = {
        "rank_pattern": {"down_proj": 9, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"o_proj": 16},
    }
    whole = write_adapter(root / "all", layers, kinds, rank=8, alpha=4, seed=2, use_rslora=True, **patterns)
    (root / "few" / "adapter_model.bin").write_bytes(b"no pickle is read")
    given = [f"few={few}", f"all={whole}"]
    adapters = read_adapters(given, TARGET, ["target"], is_v2=IS_CUDA)
    references: dict[str | None, Reference] = {None: Reference(TARGET)}
    for each in adapters:
        references[each.name] = Reference(TARGET)
        merge_adapter(references[each.name].model, each.path)
    tokenizer = Tokenizer.from_dir(TARGET)
    rows = json.loads((ROOT_DIR / "prompts.json").read_text(encoding="utf-8"))[:60:20]
    prompts = [tuple(tokenizer.encode(row["text"], add_special_tokens=False)) for row in rows]
    with running_engine(TARGET, scheduler=STEADY, adapters=adapters) as engine:
        engine.calibrate()
        yield Tuned(engine, adapters, references, prompts)


@pytest.mark.parametrize("guess", [nothing, right, wrong, mixed])
def test_texts_are_those_of_merged_weights(tuned: Tuned, guess: Guess) -> None:
    """The base and both adapters beside one another in each step, with no, right, wrong and mixed drafts."""
    texts = tuned.texts(tuned.prompts[:2], SAMPLINGS[:2])
    before = {name: counts_of(tuned, name) for name in ("few", "all")}
    asked = [
        (flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0, adapter=name), truth, guess)
        for name, prompt, params, truth in texts
    ]
    running = run_all(tuned.engine, asked)
    assert [text.tokens for text in running] == [truth for *_, truth in texts]
    assert len({(prompt, params, tuple(truth)) for _, prompt, params, truth in texts}) == len(texts) == 12, (
        "an adapter changes no text"
    )
    for adapter, counts in before.items():
        usages = [text.wait().usage for text, (name, *_) in zip(running, texts, strict=True) if name == adapter]
        accepted = sum(usage.accepted_tokens for usage in usages)
        verified = accepted + sum(usage.rejected_tokens for usage in usages)
        counted = counts_of(tuned, adapter) - counts
        assert counted.tolist() == [NUM_TOKENS * 4, accepted, verified] and len(usages) == 4
        assert (accepted > 0) == (guess in (right, mixed)) and (guess is not nothing or not verified)


def counts_of(tuned: Tuned, adapter: str) -> NDArray[np.int64]:
    counts = tuned.engine.stats().distributions.adapters[adapter]
    return np.array([counts.committed, counts.accepted, counts.proposed])


def test_a_draft_of_the_base_drafts_for_an_adapter(tuned: Tuned) -> None:
    """Guesses of the base model's next tokens: those that both agree in are accepted, and the text is the adapter's."""
    prompt, params, asked = tuned.prompts[0], SAMPLINGS[0], []
    truth = tuned.references["few"](prompt, NUM_TOKENS, params)
    for at in range(0, 24, 2):
        prefix = (*prompt, *truth[:at])
        draft = tuple(tuned.references[None](prefix, 2, params))
        request = flat_request(prefix, params, NUM_TOKENS, draft=draft, once=True, adapter="few")
        asked.append((request, truth[at:], nothing))
    texts = run_all(tuned.engine, asked)
    for text, (_, rest, _) in zip(texts, asked, strict=True):
        assert text.tokens == rest[: len(text.tokens)] and text.tokens
    accepted, rejected = (
        sum(getattr(text.wait().usage, name) for text in texts) for name in ("accepted_tokens", "rejected_tokens")
    )
    assert 0 < accepted < accepted + rejected == 2 * len(asked)


def test_adapters_share_no_keys_and_values(tuned: Tuned) -> None:
    """Of one owner and one prompt: what the cache has for a model it has for no other."""
    prompt = tuple(7 + (at * at) % 900 for at in range(300))

    def num_cached(adapter: str | None) -> int:
        truth = tuned.references[adapter](prompt, 4)
        request = flat_request(prompt, SamplingParams(), 4, patience_ms=0.0, adapter=adapter, owner=b"one")
        (text,) = run_all(tuned.engine, [(request, truth, nothing)])
        assert text.tokens == truth
        return text.wait().usage.cached_prompt_tokens

    assert [num_cached(name) for name in ("few", "all", None)] == [0, 0, 0]
    assert all(num_cached(name) > 100 for name in ("few", "all", None))


@contextmanager
def serving(tuned: Tuned) -> Iterator[tuple[httpx.Client, list[tuple[str | None, str]]]]:
    """The HTTP API over the engine, and the identity of each model."""
    targets = {each.name: f"{number}" * 16 for number, each in enumerate(tuned.adapters, 1)}
    tokenizer = Tokenizer.from_dir(TARGET, name="target")
    model = ServedModel("target", tokenizer, frozenset({0}), target="0" * 16, adapters=targets)
    store = MemoryStore()
    app = app_over(tuned.engine, model, None, (), store)
    with (
        closing(store),
        serve_app(app, drain_s=0.0) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        yield client, [(None, "0" * 16), *targets.items()]


def test_requests_name_an_adapter(tuned: Tuned) -> None:
    """Sessions, verifications and completions by name, and what the answers say of it."""
    prompt = list(tuned.prompts[0])
    with serving(tuned) as (client, targets):
        for name, target in targets:
            truth, asked = tuned.references[name](prompt, 12), {} if name is None else {"model": name}
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **asked}
            text = run_session(client, body)
            assert (text.tokens, text.open.model, text.open.target) == (truth, name or "target", target)
            verify = {"items": [{"prefix": prompt, "draft": [*truth[:3], truth[3] + 1]}], **asked}
            answer = client.post("/v1/verify", json=verify).json()
            assert answer["results"][0]["tokens"] == truth[:4]
            assert (answer["model"], answer["target"]) == (name or "target", target)
            completion = client.post("/v1/completions", json=body | {"temperature": 0}).json()
            assert (completion["model"], completion["system_fingerprint"]) == (name or "target", target)
            assert completion["choices"][0]["text"] == Tokenizer.from_dir(TARGET).decode(truth)
        shown = client.get("/metrics").text
        for name in ("few", "all"):
            found = re.search(rf'outrider_adapter_generation_tokens_total{{adapter="{name}"}} (\d+)', shown)
            assert found is not None and int(found[1]) >= 12 + 4 + 12


def test_a_text_goes_on_with_its_adapter(tuned: Tuned) -> None:
    """Resumed by its tokens or by the hash of a kept prefix, which is of no use with another model."""
    with serving(tuned) as (client, _):
        for name, other, prompt in (("few", "all", list(tuned.prompts[1])), ("all", "few", list(tuned.prompts[2]))):
            truth = tuned.references[name](prompt, 20)
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "keep_prefix": True, "model": name}
            begun = run_session(client, body)
            assert begun.tokens == truth[:8] and begun.end.prefix_hash is not None
            rest = {"prompt": [*prompt, *truth[:8]], "max_tokens": 12, "ignore_eos": True, "model": name}
            assert run_session(client, rest).tokens == truth[8:]
            held = {"prompt": [truth[8]], "prefix_hash": begun.end.prefix_hash, "max_tokens": 11, "ignore_eos": True}
            for model in (None, other):
                asked = held if model is None else held | {"model": model}
                assert code_of(client.post("/v1/sessions", json=asked)) == (409, "prefix_not_held")
            assert run_session(client, held | {"model": name}).tokens == truth[9:]
            item = {"prefix": prompt, "draft": truth[:2]}
            first = client.post("/v1/verify", json={"items": [item], "model": name}).json()["results"][0]
            again = {"items": [{"prefix_hash": first["prefix_hash"]}]}
            assert code_of(client.post("/v1/verify", json=again | {"model": other})) == (409, "prefix_not_held")
            found = client.post("/v1/verify", json=again | {"model": name}).json()["results"][0]
            assert [*first["tokens"], *found["tokens"]] == truth[:4]


def test_an_earlier_text_is_of_use_to_its_adapter_only(tuned: Tuned) -> None:
    """The server drafts a repeated prompt from the text that the same model gave it."""
    prompt = list(tuned.prompts[2])
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "patience_ms": 0.0}
    with serving(tuned) as (client, _):
        first = run_session(client, body | {"model": "few"})
        others = [run_session(client, body), run_session(client, body | {"model": "all"})]
        again = run_session(client, body | {"model": "few"})
        assert [text.open.recent_tokens for text in (first, *others, again)] == [None, None, None, 24]
        assert again.tokens == first.tokens == tuned.references["few"](prompt, 24)


def test_what_vllm_cannot_load_is_said(tuned: Tuned, tmp_path: Path) -> None:
    """With vLLM's words for what the adapter has; a start ends with them."""
    path = write_adapter(tmp_path / "a", shapes_of(TARGET), ("q_proj",), rank=2, alpha=2, seed=3, use_dora=True)
    adapters = (*tuned.adapters, *read_adapters([f"a={path}"], TARGET, [], is_v2=IS_CUDA))
    processes = tuned.engine._processes
    loading = processes._load_adapters({each.name: str(each.path) for each in adapters})
    with pytest.raises(ConfigError, match=r"cannot load the adapter a in .*DoRA"):
        asyncio.run_coroutine_threadsafe(loading, processes.loop).result(TIMEOUT_S)
