"""Engines that spill parked prefixes to a directory, and the store alone."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tests.engine_harness import SAMPLED, Collector, Harness
from tests.requests import flat_request
from tests.waiting import wait_until

from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine import spill as spill_module
from outrider.cloud.engine.config import SpillConfig
from outrider.cloud.engine.spill import SpillStore
from outrider.cloud.engine.spill_file import MAGIC, SpillTarget
from outrider.cloud.seam import Totals

PROMPT = tuple(range(1, 14))
TARGET = SpillTarget("t", ("u8[8]",), 4, 8, 100, 64)
TOKENS = [5, 6, 7, 8, 9, 1, 2, 3, 4]


class SpillHarness(Harness):
    """An engine that spills; its blocks arrive from a thread, so a run waits for what is being read."""

    def __init__(self, place: Path, *, always: bool = False, target: str = "t", max_parked: int = 256) -> None:
        spill = SpillConfig(place, target, always=always)
        super().__init__(config=EngineConfig(spill=spill, max_parked=max_parked), num_blocks=64)
        self.swap = self.engine._swap
        assert self.swap.store is not None
        self.spill = self.swap.store

    def text(self, collector: Collector) -> list[int]:
        """Runs until this sequence has ended."""
        self.steps_until(lambda: collector.end is not None)
        return collector.tokens

    def steps_until(self, is_so: Callable[[], bool]) -> None:
        """Runs steps, one at least, until it is so."""

        def is_so_after_a_step() -> bool:
            self.engine.step()
            return is_so()

        wait_until(is_so_after_a_step)

    def submit(self, prompt: Sequence[int], *given: Any, **options: Any) -> tuple[int, Collector]:
        """As the routes do: looks on disk first."""
        name, owner, salt = options.get("prefix_hash"), options.get("owner", b""), options.get("salt", b"")
        found, stored, asker = SimpleQueue[Any](), None, flat_request((), SAMPLED, 1, salt=salt).asker
        if name is not None and self.engine.seek(owner, asker.name_of(name), found.put):
            stored = found.get(timeout=30.0)
        return super().submit(prompt, *given, stored=stored, **options)

    def keep(self, prompt: tuple[int, ...] = PROMPT, owner: bytes = b"", salt: bytes = b"") -> tuple[str, list[int]]:
        """A finished session that is parked: its name and all its tokens."""
        _, collector = self.submit(prompt, 8, keep=True, owner=owner, salt=salt)
        tokens, name = self.text(collector), collector.ended.prefix_hash
        assert name is not None
        return name, [*prompt, *tokens]

    def go_on(self, name: str, *, owner: bytes = b"", salt: bytes = b"") -> tuple[list[int], int]:
        """The text that continues a kept prefix, and how many of its prompt's tokens were in the cache."""
        _, collector = self.submit((3, 4), 10, prefix_hash=name, owner=owner, salt=salt)
        return self.text(collector), collector.ended.usage.cached_prompt_tokens


@contextmanager
def engine(place: Path, **options: object) -> Iterator[SpillHarness]:
    """An engine that is closed at the end, with every block returned."""
    harness = SpillHarness(place, **options)  # type: ignore[arg-type]
    with closing(harness.engine):
        yield harness
        harness.assert_all_returned()
    assert not harness.spill._thread.is_alive()


def left_by_another(
    place: Path, prompt: tuple[int, ...] = PROMPT, owner: bytes = b"", salt: bytes = b""
) -> tuple[str, list[int]]:
    """A prefix that an engine, which has ended, has written there: its name and all its tokens."""
    with engine(place, always=True) as first:
        found = first.keep(prompt, owner, salt)
        first.spill.flush()
    return found


@contextmanager
def store(place: Path, clock: Callable[[], float] = time.time, **limits: object) -> Iterator[SpillStore]:
    config = SpillConfig(place, "t", **limits)  # type: ignore[arg-type]
    with closing(SpillStore(config, TARGET, Totals(), clock)) as opened:
        yield opened


def blocks(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 8), np.uint8)


class Hung:
    """A disk that does not answer until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()
        real = getattr(spill_module, name)

        def call(*given: Any) -> Any:
            self.asked.set()
            assert self.answers.wait(30.0)
            return real(*given)

        monkeypatch.setattr(spill_module, name, call)


def header_of(data: bytes) -> tuple[dict[str, Any], int]:
    """What the header of a file says, and where what follows it begins."""
    (length,) = struct.unpack("<I", data[8:12])
    return json.loads(data[12 : 12 + length]), 12 + length + 32


def with_facts(data: bytes, **changed: object) -> bytes:
    """The file with another header, which is whole."""
    facts, end = header_of(data)
    header = json.dumps(facts | changed).encode()
    start = MAGIC + struct.pack("<I", len(header)) + header
    return start + sha256(start).digest() + data[end:]
