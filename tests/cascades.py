"""A mid-size verifier before the target: two real servers on loopback ports that speak the fake language.

The mid-size verifier agrees with the target as often as asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import (
    FakeServer,
    StepGate,
    fake_tokenizer,
    serve_fake,
)

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.upstream import (
    UpstreamRetry,
)
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice

VOCAB = fake_tokenizer().size
PROMPT = [5, 17, 60, 4]
LENGTH = 60
SETTINGS = [SamplingParams(), SamplingParams(0.8, seed=11), SamplingParams(0.8, top_p=0.9, top_k=40, seed=12)]


class MidRuntime(FakeBatchRuntime):
    """The fake target, but in a share of contexts with other logits."""

    def __init__(self, agreement: float, on_step: Callable[[Sequence[SequenceSlice]], None] | None = None) -> None:
        super().__init__(vocab_size=VOCAB, on_step=on_step)
        self._agreement = agreement

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """One step."""
        rows = super().forward(batch)
        keys = rows[:, 0].view(np.uint32).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        differs = (keys >> np.uint64(40)).astype(np.float64) * 2.0**-24 >= self._agreement
        rows[differs] = rows[differs, ::-1]
        return rows


@dataclass(frozen=True)
class Cascade:
    """Both servers. client: of the mid-size verifier."""

    big: FakeServer
    mid: FakeServer
    client: httpx.Client

    @property
    def engine(self) -> CascadeEngine:
        """The mid-size verifier's."""
        engine = self.mid.core.engine
        assert isinstance(engine, CascadeEngine)
        return engine


@contextmanager
def cascade(
    agreement: float = 0.8,
    *,
    settings: ServerSettings | None = None,
    big_settings: ServerSettings | None = None,
    form: TreeForm = TreeForm.AUTO,
    mid_gate: StepGate | None = None,
    big_gate: StepGate | None = None,
    key: str | None = None,
    retry: UpstreamRetry | None = None,
) -> Iterator[Cascade]:
    """A mid before the target."""
    config = EngineConfig(form=form)
    with (
        serve_fake(big_settings, name="big", config=config, gate=big_gate) as big,
        serve_fake(
            settings,
            name="mid",
            config=config,
            runtime=MidRuntime(agreement, mid_gate),
            gate=mid_gate,
            upstream=big.url,
            upstream_key=key,
            upstream_retry=retry,
        ) as mid,
        httpx.Client(base_url=mid.url, timeout=30.0) as client,
    ):
        yield Cascade(big, mid, client)


def asking(params: SamplingParams = SETTINGS[1], **more: object) -> dict[str, object]:
    """A session's body; it ends only by its length."""
    sampling = {each.name: getattr(params, each.name) for each in fields(params)}
    return {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, **sampling, **more}
