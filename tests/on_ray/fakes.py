"""Opens fake replicas in Ray's processes: the made-up language, at a given time per step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.fake_runtime import FakeBatchRuntime
from tests.serving import EOS_ID, fake_tokenizer

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.serve import open_recent
from outrider.models.http.logs import LogFormat, configure_logging
from outrider.models.http.security import KeyRing


@dataclass(frozen=True)
class OpenFake:
    """Opens a replica of the language `seed`, whose steps take `step_s`. version: another is a new deployment.

    redis: where it keeps recent texts; "": nowhere.
    """

    seed: int = 0
    step_s: float = 0.005
    drain_s: float = 0.1
    version: int = 0
    redis: str = ""

    @contextmanager
    def __call__(self, tag: str, keys: KeyRing) -> Iterator[VerifierServer]:
        """The server, its engine started."""
        configure_logging(LogFormat.TEXT)
        tokenizer = fake_tokenizer()
        runtime = FakeBatchRuntime(
            vocab_size=tokenizer.size, seed=self.seed, on_step=lambda batch: time.sleep(self.step_s)
        )
        engine = EngineThread(runtime)
        model = ServedModel("fake", tokenizer, frozenset({EOS_ID}), target=f"{self.seed:016x}")
        settings = ServerSettings(keys=keys, session_prefix=tag, metrics_age_s=0.0)
        kept = ServeOptions("fake", recent=bool(self.redis), redis=self.redis or None)
        with open_recent(kept) as recent:
            server = VerifierServer(create_app(engine, model, settings, recent=recent), drain_s=self.drain_s)
            engine.start()
            try:
                yield server
            finally:
                engine.stop()
