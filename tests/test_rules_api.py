"""The acceptance rules over HTTP: /v1/verify, the device's stop-and-wait, labels and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.agents import drafter
from tests.chi_square import CHANCE, PROMPT, Languages
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import FakeServer, code_of, run_session, serve_fake, target_tokens

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import result_as_json, summary_lines
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.stop_and_wait import propose_drawn
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, Source
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ConfigError, OutriderError
from outrider.models.picks.acceptance import WARM_UP, Rule, RuleTerms
from outrider.models.picks.rejection import WHOLE
from outrider.models.picks.sampling import SamplingParams

REJECTION = RuleTerms(Rule.REJECTION)
LOSSY = RuleTerms(Rule.TOLERANCE, delta=1.0)
TOLERANT = ServerSettings(allow_tolerance=True)


def small(languages: Languages) -> FakeBatchRuntime:
    """The target of these languages."""
    return FakeBatchRuntime(vocab_size=languages.size, num_blocks=1024)


class DraftRuntime(FakeSequenceRuntime):
    """The draft of these languages."""

    def __init__(self, languages: Languages) -> None:
        super().__init__(vocab_size=languages.size, max_branches=1)
        self._languages, self._tokens = languages, list[int]()

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._tokens[self.length :] = tokens
        super().extend(tokens)
        return self._languages.draft_row(tuple(self._tokens[len(PROMPT) :]))


async def generate(
    url: str, drafter: Drafter, terms: RuleTerms, requests: Sequence[GenerationRequest]
) -> list[GenerationResult]:
    """By stop-and-wait."""
    async with VerifierClient(url) as client:
        agent = make_agent(Mode.STOP_AND_WAIT, Endpoints([client]), drafter, "3", AgentOptions(terms=terms))
        return [await agent.generate(request) for request in requests]


def test_verify_by_rejection_writes_every_text_as_often_as_the_target() -> None:
    """Chi-square over whole texts; 250 items a call, blocks of no, one or two tokens."""
    languages, num = Languages(), 600
    texts: list[list[int]] = [[] for _ in range(num)]
    with serve_fake(runtime=small(languages)) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        while open_texts := [index for index, text in enumerate(texts) if len(text) < languages.length][:250]:
            items = []
            for seed, text in ((seed, texts[seed]) for seed in open_texts):
                count = min((seed + len(text)) % 3, languages.length - len(text) - 1)
                tokens, qs = languages.block(text, count, seed)
                items.append(
                    {
                        "prefix": [*PROMPT, *text],
                        "draft": tokens,
                        "draft_q": [[*chain(*zip(q.ids, q.weights, strict=True))] for q in qs],
                        "rule": "rejection",
                        "temperature": languages.params.temperature,
                        "seed": seed,
                        "max_tokens": languages.length - len(text),
                        "ignore_eos": True,
                    }
                )
            answer = client.post("/v1/verify", json={"items": items})
            assert answer.status_code == 200, answer.text
            for seed, result in zip(open_texts, answer.json()["results"], strict=True):
                texts[seed] += result["tokens"]
                assert result["rule"] == "rejection" and "lossy" not in result
    assert languages.excess(texts) < CHANCE


async def test_stop_and_wait_by_rejection_is_a_function_of_the_seed() -> None:
    """Every block waits for its answer, so nothing depends on time."""
    languages = Languages(length=12)
    asked = [GenerationRequest(PROMPT, languages.with_seed(seed), 12, ignore_eos=True) for seed in range(5)]
    with serve_fake(runtime=small(languages)) as server:
        one, again = [
            await generate(server.url, ModelDrafter(DraftRuntime(languages)), REJECTION, asked) for _ in range(2)
        ]
    assert [each.tokens for each in one] == [each.tokens for each in again]
    assert sum(each.num_accepted for each in one) > 10
    assert {(each.rule, each.is_lossy) for each in one} == {(Rule.REJECTION, False)}


def long_requests(num: int, temperature: float = 0.8) -> list[GenerationRequest]:
    return [
        GenerationRequest((5, 6, seed), SamplingParams(temperature=temperature, seed=seed), 100, ignore_eos=True)
        for seed in range(num)
    ]


async def test_tolerance_is_calibrated_on_the_way() -> None:
    """0.7 within 0.03 after the first text: the next begins with the delta where the last ended."""
    terms = RuleTerms(Rule.TOLERANCE, acceptance=0.7)
    with serve_fake(TOLERANT, config=EngineConfig(policy=Policy.VERIFY)) as server:
        results = await generate(server.url, drafter(0.8), terms, long_requests(5))
    tested, accepted = (sum(getattr(each, name) for each in results[1:]) for name in ("num_tested", "num_accepted"))
    assert tested > 300 and accepted / tested == pytest.approx(0.7, abs=0.03)
    assert results[0].num_tested >= WARM_UP and all(each.is_lossy for each in results)


@pytest.fixture(scope="module")
def tolerant() -> Iterator[httpx.Client]:
    """A client of a server that allows tolerance."""
    with serve_fake(TOLERANT) as server, httpx.Client(base_url=server.url, timeout=30.0) as opened:
        yield opened


def test_tolerance_is_refused_unless_the_server_allows_it(client: httpx.Client) -> None:
    verified = client.post("/v1/verify", json={"items": [{"prefix": [1, 2], "rule": "tolerance"}]})
    assert code_of(verified) == (403, "tolerance_not_allowed")


def judged(**fields: Any) -> dict[str, Any]:
    """An item of a drafted token."""
    return {"items": [{"prefix": [1, 2], "draft": [1], **fields}]}


def tolerated(log_q: float, delta: float) -> dict[str, Any]:
    return judged(rule="tolerance", draft_log_q=[log_q], delta=delta)


NO_NUMBER = ("invalid_parameter", "malformed_json")


@pytest.mark.parametrize(
    ("path", "body", "codes"),
    [
        # A session is of no rule that judges by probabilities, whatever else an older device sends with it.
        ("sessions", {"prompt": [1, 2], "rule": "rejection"}, ["unsupported_rule"]),
        ("sessions", {"prompt": [1], "rule": "tolerance", "delta": 2.0, "acceptance": 0.7}, ["unsupported_rule"]),
        ("verify", judged(rule="rejection", draft_q=[[1, math.nan]], temperature=1), NO_NUMBER),
        ("verify", tolerated(math.nan, 1), NO_NUMBER),
        ("verify", tolerated(-0.1, math.nan), NO_NUMBER),
        ("verify", tolerated(0.5, 1), NO_NUMBER),
        ("verify", tolerated(-math.inf, 1), NO_NUMBER),
        ("verify", tolerated(-1, 31), NO_NUMBER),
    ],
)
def test_what_a_rule_cannot_judge_is_refused_by_name(
    tolerant: httpx.Client, path: str, body: dict[str, Any], codes: Sequence[str]
) -> None:
    """Never another rule in silence."""
    answer = tolerant.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] in codes


@pytest.mark.parametrize(("threshold", "status"), [(0.6, 200), (0.5, 400)])
def test_xtc_goes_with_a_rule_where_its_threshold_is_off(tolerant: httpx.Client, threshold: float, status: int) -> None:
    xtc = {"xtc_probability": 0.5, "xtc_threshold": threshold}
    item = judged(rule="tolerance", draft_log_q=[-0.1], delta=1.0, **xtc)
    assert tolerant.post("/v1/verify", json=item).status_code == status


def test_every_result_says_that_tolerance_is_lossy() -> None:
    """And metrics count it; other rules' results do not have the words at all."""
    with serve_fake(TOLERANT) as server, httpx.Client(base_url=server.url) as client:
        item = {"prefix": [1, 2], "draft": [7], "draft_log_q": [-0.1], "rule": "tolerance", "delta": 30.0}
        result, bare = client.post("/v1/verify", json={"items": [item, {"prefix": [1, 2]}]}).json()["results"]
        assert result["lossy"] is True and result["accepted"] == result["tested"] == 1 and result["tokens"][0] == 7
        assert not {"rule", "lossy", "tested"} & set(bare)
        metrics = client.get("/metrics").text
        assert "outrider_tolerance_sequences_total 1.0" in metrics and "outrider_tolerated_tokens_total 1.0" in metrics


def test_a_session_may_be_greedy(client: httpx.Client) -> None:
    greedy = {"prompt": [1, 2], "max_tokens": 6, "rule": "greedy", "temperature": 0.9, "ignore_eos": True}
    assert run_session(client, greedy).tokens == target_tokens([1, 2], 6)


HALF = WHOLE // 2
BAD_Q: dict[str, Any] = {
    "negative": [[1, WHOLE + 4, 2, -4]],
    "a float": [[1, HALF, 2, HALF + 0.5]],
    "sum": [[1, HALF, 2, HALF - 1]],
    "twice": [[1, HALF, 1, HALF]],
    "too many": [[1, WHOLE, *(number for each in range(2, 18) for number in (each, 0))]],
    "not drawn": [[2, HALF, 3, HALF]],
    "odd": [[1, HALF, 2]],
    "one too few": [],
    "one too many": [[1, WHOLE], [1, WHOLE]],
    "beyond the vocabulary": [[1, HALF, 100_000, HALF]],
}
CODES = {"invalid_parameter", "wrong_evidence", "token_out_of_range"}


@pytest.mark.parametrize("name", BAD_Q)
def test_a_distribution_that_is_none_is_refused_by_name(client: httpx.Client, name: str) -> None:
    """And its neighbour is verified."""
    item = {"prefix": [1, 2], "draft": [1], "rule": "rejection", "draft_q": BAD_Q[name], "temperature": 1.0}
    good, bad = client.post("/v1/verify", json={"items": [{"prefix": [1, 2]}, item]}).json()["results"]
    assert "error" not in good and bad["error"]["code"] in CODES


@pytest.mark.parametrize("fields", [{"delta": 1.0}, {"rule": "rejection", "delta": 1.0}, {"rule": "lenient"}])
def test_parameters_of_another_rule_are_refused_by_name(tolerant: httpx.Client, fields: dict[str, Any]) -> None:
    answer = tolerant.post("/v1/verify", json={"items": [{"prefix": [1], **fields}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in {f"items.0.{name}" for name in (*fields, "rule")} | {"delta"}


def test_what_a_client_sends_changes_its_own_text_only(tolerant: httpx.Client) -> None:
    """A coupled session beside one whose every draft is forced by delta 30."""
    lossy = {
        "prefix": [1, 2],
        "draft": [9] * 32,
        "draft_log_q": [-30.0] * 32,
        "rule": "tolerance",
        "delta": 30.0,
        "temperature": 0.8,
        "ignore_eos": True,
    }
    plain = {"prefix": [1, 2], "temperature": 0.8, "seed": 3, "ignore_eos": True}
    results = tolerant.post("/v1/verify", json={"items": [lossy, plain, lossy, plain]}).json()["results"]
    alone = target_tokens([1, 2], 1, SamplingParams(temperature=0.8, seed=3))
    assert results[1]["tokens"] == results[3]["tokens"] == alone
    assert results[0]["tokens"][:8] == [9] * 8


def test_a_draft_without_probabilities_is_refused_on_the_device() -> None:
    endpoints = Endpoints([VerifierClient("http://nobody")])
    with pytest.raises(ConfigError, match="lookup has no probabilities"):
        make_agent(Mode.STOP_AND_WAIT, endpoints, NgramDrafter(), options=AgentOptions(terms=REJECTION))


async def test_a_device_that_asks_for_tolerance_hears_why_not(server: FakeServer) -> None:
    with pytest.raises(OutriderError, match="does not allow it"):
        await generate(server.url, drafter(1.0), LOSSY, long_requests(1))


def test_the_command_s_options_make_the_rule_and_idle_ones_are_refused() -> None:
    found = RunOptions(prompt="a", mode=Mode.STOP_AND_WAIT, rule=Rule.TOLERANCE, delta="70%", seed=1)
    assert found.terms == RuleTerms(Rule.TOLERANCE, acceptance=0.7)
    idle: tuple[dict[str, Any], ...] = (
        {"delta": "1.0"},
        {"rule": Rule.REJECTION, "mode": Mode.STOP_AND_WAIT, "delta": "70%"},
        {"rule": Rule.TOLERANCE, "mode": Mode.STOP_AND_WAIT, "delta": "100%"},
        {"rule": Rule.TOLERANCE, "mode": Mode.STOP_AND_WAIT, "delta": "much"},
        {"rule": Rule.REJECTION},
        {"rule": Rule.REJECTION, "mode": Mode.STOP_AND_WAIT, "offline_ok": True},
        {"rule": Rule.REJECTION, "mode": Mode.CLOUD_ONLY},
    )
    for options in idle:
        with pytest.raises(ConfigError):
            RunOptions(prompt="a", seed=1, **options)


def test_what_a_rule_wrote_is_labelled_in_the_summary() -> None:
    plain = GenerationResult(Mode.STREAM, (1,), (Source.DRAFT,), (0.1,), "length", 1, 1, 1, 1)
    for result, is_lossy in ((plain, False), (replace(plain, rule=Rule.TOLERANCE), True)):
        assert summary_lines(result)[0].startswith("LOSSY") == result_as_json(result, "a")["lossy"] == is_lossy


def test_rejection_draws_one_guess_that_depends_on_the_position_and_the_seed() -> None:
    languages = Languages()
    drawing, propose = ModelDrafter(DraftRuntime(languages)), partial(propose_drawn, num_ids=languages.size - 1)
    for seed in range(20):
        drawing.begin(PROMPT, languages.with_seed(seed))
        ((guess,),) = drawing.guess_by([[1]], propose)
        assert ([guess.token], [guess.evidence]) == languages.block([1], 1, seed)
    assert drawing.continuation(5) == [] and drawing.length == len(PROMPT)
