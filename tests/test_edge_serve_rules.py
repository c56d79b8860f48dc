"""`outrider serve --rule`: every text by that rule, and a lossy one is labelled wherever it is shown."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from tests.fake_runtime import FakeBatchRuntime
from tests.local_endpoint import serve_local
from tests.serving import fake_tokenizer, serve_fake

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.cli.serve_options import ServeOptions
from outrider.edge.serve.state import LocalSettings
from outrider.models.acceptance import Rule, RuleTerms
from outrider.models.errors import ConfigError

TOLERANT = ServerSettings(allow_tolerance=True)
TEXT = {"prompt": "def a", "max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": True}


WAITS = EngineConfig(policy=Policy.VERIFY, looks_up=False)


def slow() -> FakeBatchRuntime:
    """A target whose steps are long beside a draft's way, so that its engine waits for drafts."""
    return FakeBatchRuntime(vocab_size=fake_tokenizer().size, on_step=lambda batch: time.sleep(0.02))


def ask(url: str, **fields: object) -> dict[str, object]:
    answer = httpx.post(url + "/v1/completions", json=TEXT | fields, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def chunks_of(url: str) -> list[dict[str, object]]:
    body = httpx.post(url + "/v1/chat/completions", json=CHAT, timeout=30).text
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_every_text_of_tolerance_says_that_it_is_lossy() -> None:
    """Answers, chunks, metrics and the page; the calibrated delta goes from one text to the next."""
    terms = RuleTerms(Rule.TOLERANCE, delta=0.01, acceptance=0.95)
    with (
        serve_fake(settings=TOLERANT, config=WAITS, runtime=slow()) as cloud,
        serve_local(cloud.url, LocalSettings(terms=terms, shows_metrics=True)) as local,
    ):
        before = ask(local.url)
        assert before["lossy"] is True
        first = local.core.delta
        assert first is not None and first != 0.01
        ask(local.url, seed=4)
        assert local.core.delta != first
        assert all(chunk["lossy"] is True for chunk in chunks_of(local.url))
        info = httpx.get(local.url + "/v1/outrider/info").json()
        assert (info["rule"], info["is_lossy"]) == ("tolerance", True)
        metrics = httpx.get(local.url + "/metrics").text
        assert "outrider_device_lossy_texts_total 3.0" in metrics and "outrider_device_tolerated_total" in metrics
        assert cloud.core.engine.stats().totals.tolerance_sequences == 3


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_texts_of_other_rules_say_nothing(rule: Rule) -> None:
    """And are accepted by that rule: the coupled one is the target's own."""
    with (
        serve_fake(config=WAITS, runtime=slow()) as cloud,
        serve_local(cloud.url, LocalSettings(terms=RuleTerms(rule))) as local,
    ):
        answers = [ask(url) for url in (local.url, cloud.url)]
        assert "lossy" not in answers[0] and all("lossy" not in chunk for chunk in chunks_of(local.url))
        info = httpx.get(local.url + "/v1/outrider/info").json()
        assert (info["rule"], info["is_lossy"]) == (rule.value, False)
        details = answers[0]["usage"]["completion_tokens_details"]  # type: ignore[index]
        assert details["accepted_prediction_tokens"] > 0
        assert cloud.core.engine.stats().totals.rejection_sequences == (2 if rule is Rule.REJECTION else 0)
        texts = [answer["choices"][0]["text"] for answer in answers]  # type: ignore[index]
        assert (texts[0] == texts[1]) or rule is Rule.REJECTION


def test_a_verifier_that_does_not_allow_it_is_named() -> None:
    """The client did not ask for it: the endpoint's options do not fit its verifier."""
    with serve_fake() as cloud, serve_local(cloud.url, LocalSettings(terms=RuleTerms(Rule.TOLERANCE))) as local:
        answer = httpx.post(local.url + "/v1/completions", json=TEXT, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "verifier_refused")
        assert "does not allow it" in answer.json()["error"]["message"]


def test_the_options_of_rules_are_checked() -> None:
    """The draft alone writes by no rule."""
    assert ServeOptions(rule=Rule.REJECTION).rule is Rule.REJECTION
    with pytest.raises(ConfigError, match="--offline-ok needs --rule coupled"):
        ServeOptions(rule=Rule.TOLERANCE, offline_ok=True)
