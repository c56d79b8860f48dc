"""Serves the local endpoint: `outrider serve`.

In this order, so that a mistake shows before the model is loaded: options, keys, port, bundle; then the draft, a look
at the verifier, and the line that says that the server is ready.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from rich.console import Console

from outrider.edge.cli.command_options import ServeOptions, refuse_one_file
from outrider.edge.cli.draft_source import (
    Notes,
    agent_options,
    find_drafts,
    open_library,
    other_tokenizer,
    place_drafts,
    show_notes,
)
from outrider.edge.cli.option_groups import refuse_idle
from outrider.edge.cli.placing import measured_link
from outrider.edge.cli.verifiers import Verifiers, open_verifiers
from outrider.edge.devices.power import PowerWatch
from outrider.edge.modes.draft_ladder import lazy_model, open_first
from outrider.edge.serve.lent_drafts import DraftSequences
from outrider.edge.serve.server import LocalServer
from outrider.edge.serve.state import LocalCore, LocalSettings, OfflineSettings
from outrider.edge.serve.upstream import Upstream
from outrider.edge.setup.endpoints import require_private
from outrider.models.client.client import VerifierClient
from outrider.models.client.tracing import start_tracing
from outrider.models.counted import counted
from outrider.models.hosts import is_loopback
from outrider.models.http.logs import LogFormat, configure_logging
from outrider.models.http.security import KeyRing, page_policy, require_safe_host
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.sockets import READY_PREFIX, open_socket, tls_files, url_of
from outrider.models.process.command_line import print_error
from outrider.models.process.extras import require_packages
from outrider.models.process.heap import bound_heaps
from outrider.models.process.watched_files import FileWatch, WatchedFiles
from outrider.models.visible import visible

_log = logging.getLogger("outrider.serve")

_SWITCH_S: Final = 0.001
"""How long another thread may keep Python from the event loop, which lets go at each read and write. By default it is
5 ms: while a request's documents are indexed, answers to others took 100 ms."""
DRAIN_S: Final = 5.0
"""How long texts may take to finish at the end."""
_CONNECTIONS_PER_TEXT: Final = 10
"""To a verifier: a stream, and the drafts in flight."""


TARGET_ENDED: Final = 70
"""Exit code when the verifier of --target has ended by itself, so that a supervisor starts both again."""


def serve_local(options: ServeOptions) -> int:
    """Serves until a signal ends it, or the end of its own verifier. Returns the exit code.

    Raises OutriderError for what the user can put right.
    """
    cloud_keys = options.keys()
    configure_logging(LogFormat.TEXT)
    bound_heaps()
    sys.setswitchinterval(_SWITCH_S)
    if options.metrics:
        require_packages(["prometheus_client"], "--metrics", "telemetry")
    for each in cloud_keys.endpoints:
        refuse_one_file(each.key_file, options.api_key_file)
    if options.api_key_file is not None:
        require_private(options.api_key_file)
    files = []
    if options.api_key_file is not None and options.api_key_file.is_file():  # and not a pipe of the shell
        files.append(WatchedFiles("keys", [options.api_key_file], lambda: keys.reload()))
    keys = KeyRing.load(options.api_key_file)
    require_safe_host(
        options.host, keys, is_insecure_allowed=options.insecure_no_keys or options.tls_client_ca is not None
    )
    refuse_idle(options, len(keys) > 0, "clients must send a key", "any_user", "insecure_no_keys")
    tls = tls_files(options.tls_cert, options.tls_key, options.tls_client_ca)
    drafting = agent_options(options)
    about = Console(stderr=True)
    with open_socket(options.host, options.port) as sock, open_verifiers(options, about) as verifiers:
        settings = LocalSettings(
            keys=keys,
            max_requests=options.max_requests,
            max_own=options.max_own or options.max_requests,
            pages=page_policy(
                options.host,
                sock.getsockname()[0],
                options.allowed_host,
                options.allowed_origin,
                is_keyless=not len(keys),
            ),
            allowed_origins=tuple(options.allowed_origin),
            any_user=options.any_user,
            shows_details=is_loopback(options.host),
            depth=options.depth,
            options=drafting,
            shows_metrics=options.metrics,
            model=options.model,
        )
        core = _open_core(options, verifiers, settings, about)
        url = url_of(sock, is_tls=tls is not None)
        server = LocalServer(
            core,
            drain_s=DRAIN_S,
            tls=tls,
            on_ready=lambda: _announce(url, core),
        )
        end_tracing = start_tracing(lambda words: _log.warning("%s", words))
        relieve_collector()  # else a full collection stops all texts for a tenth of a second
        if tls is not None:
            files.append(WatchedFiles("certificates", tls.paths, tls.reload))
        if (own := verifiers.own) is not None:
            own.call_at_end(lambda: server.begin_drain(0.0))
        try:
            with FileWatch(files):
                server.run(sockets=[sock])
        finally:
            end_tracing()
        if own is None or own.failure is None:
            return 0
        print_error(own.failure)
        return TARGET_ENDED


def _open_core(options: ServeOptions, verifiers: Verifiers, settings: LocalSettings, about: Console) -> LocalCore:
    notes, clouds = Notes(about), verifiers.clouds
    with ThreadPoolExecutor(1) as beside:  # where no cloud answers, both looks take seconds
        link = beside.submit(measured_link, clouds)
        bundles = find_drafts(verifiers.drafts, options.choice, clouds, notes, needs_server=False)
        has_model = options.choice.runtime != "ngram"
        target = other_tokenizer(bundles, options, clouds, notes, needs_server=False, is_drafted=has_model)
        how = (options.choice, options.threads, clouds, about, link.result)
        candidates = place_drafts(bundles, *how, is_mapped=target is not None)
    bundle = candidates[0].bundle
    num_sequences = min(options.max_drafting, options.max_requests)
    tokenizer = target or bundle.tokenizer()
    library = open_library(options.docs, tokenizer, about) if options.docs is not None else None
    models = [lazy_model(each, options.threads, num_sequences, options.draft_context, target) for each in candidates]
    model, models = open_first(models, notes.line, is_asked=options.choice.wanted_device is not None)
    show_notes(model.placement, notes)
    max_connections = _CONNECTIONS_PER_TEXT * options.max_requests
    clients = [VerifierClient(url, replace(each, max_connections=max_connections)) for url, each in clouds]
    return LocalCore(
        tokenizer=tokenizer,
        fingerprint=tokenizer.fingerprint,
        upstream=Upstream(clients, tokenizer.fingerprint),
        drafts=DraftSequences(
            model,
            num_sequences,
            is_looked_up=options.is_looked_up,
            others=models[1:],
            again=models[0].open,
        ),
        settings=settings,
        placement=model.placement.words,
        library=library,
        power=PowerWatch(options.on_battery),
        offline=OfflineSettings(bundle.manifest.name, model.placement.max_positions)
        if options.offline_ok and has_model
        else None,
    )


def _announce(url: str, core: LocalCore) -> None:
    drafting = core.placement
    if core.drafts.max_sequences:
        drafting += f", for {counted(core.drafts.max_sequences, 'text')} at a time"
    lines = (f"{READY_PREFIX}{url}", f"draft: {drafting}", f"Point an OpenAI client at {url}/v1, a browser at {url}/")
    print(visible("\n".join(lines)), flush=True)  # nothing in a service under pythonw.exe, which has no output
