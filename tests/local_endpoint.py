"""Runs `outrider serve`'s endpoint on a loopback port with a fake draft: uvicorn in a thread of the test process.

with serve_fake() as cloud, serve_local(cloud.url) as local:
    httpx.get(local.url + "/v1/models")
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import fake_tokenizer
from tests.waiting import TIMEOUT_S, wait_until

from outrider.edge.devices.placement import Placement
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.modes.assemble import OpenModel
from outrider.edge.modes.draft_ladder import LazyModel
from outrider.edge.serve.lent_drafts import DraftSequences
from outrider.edge.serve.server import LocalServer
from outrider.edge.serve.state import LocalCore, LocalSettings, OfflineSettings
from outrider.edge.serve.upstream import Upstream
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.ingress.sockets import open_socket, url_of
from outrider.models.runtimes.base import SequenceRuntime

RETRY = RetryPolicy(max_failures=2, max_outage_s=0.0, max_loading_s=0.0)


@dataclass(frozen=True)
class LocalEndpoint:
    """A running endpoint: its URL and its internals."""

    url: str
    core: LocalCore
    server: LocalServer

    wait_until = staticmethod(wait_until)

    def is_at_rest(self) -> bool:
        """Whether no text is in work and every sequence of the draft is back."""
        core = self.core
        return not core.places.total and not core.tasks and not core.drafts.num_lent


def fake_draft(agreement: float = 0.8, max_positions: int = 4096) -> FakeSequenceRuntime:
    """A draft of the fake language."""
    return FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=agreement, max_positions=max_positions)


def local_core(
    cloud: str | Sequence[str],
    settings: LocalSettings | None = None,
    runtime: SequenceRuntime | None = None,
    max_sequences: int = 4,
    api_key: str | None = None,
    fingerprint: str | None = None,
    others: Sequence[LazyModel] = (),
    draft_pause_s: float = 1.0,
    offline: OfflineSettings | None = None,
) -> LocalCore:
    """What an endpoint serves. fingerprint: None is the right one. others, draft_pause_s: see DraftSequences."""
    urls = [cloud] if isinstance(cloud, str) else list(cloud)
    tokenizer = fake_tokenizer()
    fingerprint = fingerprint or tokenizer.fingerprint
    options = ClientOptions(api_key=api_key, max_connections=100)
    upstream = Upstream([VerifierClient(url, options) for url in urls], fingerprint, RETRY)
    model = OpenModel(runtime or fake_draft(), None, Placement("openvino"))
    drafts = DraftSequences(model, max_sequences, is_looked_up=True, others=others, first_pause_s=draft_pause_s)
    settings = settings or LocalSettings()
    return LocalCore(tokenizer, fingerprint, upstream, drafts, settings, "a fake draft", offline=offline)


@contextmanager
def serve_local(
    cloud: str | Sequence[str],
    settings: LocalSettings | None = None,
    *,
    runtime: SequenceRuntime | None = None,
    max_sequences: int = 4,
    drain_s: float = 0.0,
    api_key: str | None = None,
    others: Sequence[LazyModel] = (),
    draft_pause_s: float = 1.0,
    offline: OfflineSettings | None = None,
) -> Iterator[LocalEndpoint]:
    """Serves drafts of `runtime` for the verifiers at `cloud`."""
    core = local_core(
        cloud,
        settings,
        runtime,
        max_sequences,
        api_key,
        others=others,
        draft_pause_s=draft_pause_s,
        offline=offline,
    )
    server = LocalServer(core, drain_s=drain_s)
    sock = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([sock],), name="outrider-test-endpoint")
    thread.start()
    local = LocalEndpoint(url_of(sock, is_tls=False), core, server)
    try:
        local.wait_until(lambda: server.started)
        yield local
    finally:
        server.begin_drain(drain_s)
        thread.join(TIMEOUT_S)
        sock.close()
        assert not thread.is_alive(), "the endpoint did not end"
