"""Starts vLLM's processes, speaks to them on an event loop of its own thread, and ends them. Knows no sink."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.checks import ENGINE_STATE, missing_attributes, refuse, refuse_picks, require_vllm
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.parent import PLACE_VARIABLE
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.faults import log_fault
from outrider.models.runtimes.base import ModelLimits

_log = logging.getLogger("outrider.cloud")

_END_S: Final = 10.0
_SHUTDOWN_S: Final = 20.0
"""How long vLLM's processes may take to end; some 6 s on two cores."""
_MAX_PATH: Final = 107
"""Bytes of a local socket's path; vLLM's names have 36."""


class VllmProcesses:
    """vLLM's processes. Any thread may call what does not say otherwise."""

    def __init__(self, config: VllmConfig) -> None:
        """Starts them and loads the model. Raises RuntimeUnavailable or ConfigError."""
        self.version = require_vllm()
        self.place = Path(tempfile.mkdtemp(prefix="outrider-vllm-"))  # mode 0700
        self.is_closed = False
        self._others = set(multiprocessing.active_children())
        self._works: set[Future[Any]] = set()
        self._sending = threading.Lock()  # a socket is for one thread at a time
        self._context = zmq.Context()
        self._orders = wire.open_socket(self._context, zmq.PUSH, wire.MAX_ORDERS)
        self._orders.connect(wire.orders_address(self.place))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="outrider-vllm", daemon=True)
        self._thread.start()
        self._opening = asyncio.run_coroutine_threadsafe(self._open(config), self.loop)
        try:
            self.limits: ModelLimits = self._opening.result()
        except BaseException:
            self.close()
            raise

    async def _open(self, config: VllmConfig) -> ModelLimits:
        if len(bytes(self.place)) + 1 + 36 > _MAX_PATH:
            raise ConfigError(f"{self.place} is too long for the paths of local sockets; set TMPDIR to a shorter one")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self.is_closed:
            raise RuntimeUnavailable("the load was interrupted")
        # vLLM's processes inherit this thread's mask: Ctrl-C reaches all processes of a terminal, and would end them
        # while this one drains. The tracker, which Python starts beside them, would clear the mask.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        (self.place / wire.SETTINGS_NAME).write_bytes(msgspec.json.encode(config))
        self._listen()
        # vLLM's own sockets and files, too, are where only this user can reach them: some carry pickle.
        names = (PLACE_VARIABLE, "VLLM_RPC_BASE_PATH", "TMPDIR")
        before = {name: os.environ.get(name) for name in names}
        os.environ |= dict.fromkeys(names, str(self.place))
        try:
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**config.arguments))
        except (ValueError, OSError) as error:  # of the model or the options; vLLM words them
            raise ConfigError(f"vLLM cannot serve this model: {error}") from error
        except RuntimeError as error:
            raise RuntimeUnavailable(
                f"vLLM's engine process did not start ({error}); its log is above. If it names the KV cache, change "
                "--kv-cache-mb, or --vllm-option gpu_memory_utilization or max_model_len"
            ) from error
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        refuse(f"{self.version}'s AsyncLLM", missing_attributes(self.llm, ENGINE_STATE))
        for found in await self.call_workers("outrider_install", ()):
            self.runner = str(found["runner"])
            refuse(f"{self.version} with {self.runner}", found["missing"])
            refuse_picks(f"{self.version} with {self.runner}", found["differs"])
        self.adapters = await self._load_adapters(config.adapters)
        model = self.llm.model_config
        return ModelLimits(model.get_vocab_size(), model.max_model_len)

    async def _load_adapters(self, directories: Mapping[str, str]) -> dict[str, Any]:
        """vLLM's names of the adapters, by ours; each is loaded, and stays. Raises ConfigError."""
        from vllm.lora.request import LoRARequest

        found = {}
        for number, (name, directory) in enumerate(directories.items(), 1):
            found[name] = LoRARequest(name, number, directory)
            try:
                await self.llm.add_lora(found[name])
            except Exception as error:  # of each kind; vLLM words what an adapter has that it does not know
                raise ConfigError(f"vLLM cannot load the adapter {name} in {directory}: {error}") from error
        return found

    def _listen(self) -> None:
        """Opens the socket for `read_reports`. On the loop."""
        self._reports = wire.open_socket(zmq.asyncio.Context.shadow(self._context), zmq.PULL)
        self._reports.bind(wire.reports_address(self.place))

    async def read_reports(self, take: Callable[[wire.Report], None]) -> None:
        """Has `take` called with what the engine process reports, to the end of the loop."""
        while True:
            message = await self._reports.recv()
            try:
                take(wire.decode_report(message))
            except Exception as error:  # a bug of ours must not hang every client
                log_fault(error)

    async def call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Calls a method of the extension in all workers. On the loop."""
        found: list[Any] = await self.llm.collective_rpc(method, args=args)
        return found

    def post(self, act: Callable[..., None], *args: Any) -> None:
        """Has `act` called on the loop; does nothing once that is closed, when everything has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(act, *args)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` on the loop, to its end or that of the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._works.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, work: Future[Any]) -> None:
        self._works.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            log_fault(error)

    def send(self, order: wire.Order) -> bool:
        """Whether it is on its way; not where the engine process hangs, has died, or has too many to read."""
        with self._sending:
            try:
                self._orders.send(wire.encode(order), zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
        return True

    def close(self) -> None:
        """Ends them. Call it once, when nothing runs."""
        self.is_closed = True
        llm = getattr(self, "llm", None)
        if llm is not None:
            llm.shutdown(timeout=_SHUTDOWN_S)
        else:
            self._end_load()
        try:
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self.loop).result(_END_S)
        except TimeoutError:
            _log.warning("vLLM's tasks did not end")
        self.post(self.loop.stop)
        self._thread.join(timeout=_END_S)
        if not self._thread.is_alive():
            self.loop.close()
        self._orders.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.place, ignore_errors=True)

    def _end_load(self) -> None:
        """Kills the processes of a load that was interrupted: Python waits for them at its end."""
        deadline = time.monotonic() + _SHUTDOWN_S
        while time.monotonic() < deadline:
            for child in set(multiprocessing.active_children()) - self._others:
                child.kill()
            if wait([self._opening], timeout=0.1).done:
                return
        _log.warning("vLLM's load did not end")

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_reports"):
            self._reports.close()
