"""A store of recent texts in a Redis of this test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from tests.waiting import wait_until

from outrider.cloud.recent.redis_store import RedisStore
from outrider.cloud.recent.store import (
    Place,
    PromptDigest,
    RecentStore,
    RecentText,
    sampling_digest,
)
from outrider.models.picks.sampling import SamplingParams

GREEDY = sampling_digest(SamplingParams())


def place(owner: bytes = b"alice", prompt: tuple[int, ...] = (1, 2, 3), target: str = "t") -> Place:
    return PromptDigest(target, owner).with_tokens(prompt).place


def text(*tokens: int) -> RecentText:
    return RecentText(tokens, GREEDY)


def find(store: RecentStore, at: Place) -> RecentText | None:
    return asyncio.run(store.find(at))


@contextmanager
def store_at(url: str, *, max_s: float = 60.0, is_up: bool = True, wait_s: float = 5.0) -> Iterator[RedisStore]:
    """A store that tries again at once. wait_s: long, so that no slow test machine counts as a slow Redis."""
    with closing(RedisStore(url, max_s, wait_s=wait_s, retry_s=0.02)) as store:
        if is_up:
            wait_until(lambda: store.stats().up == 1)
        yield store
    assert not store._thread.is_alive()


def put(store: RedisStore, at: Place, written: RecentText) -> None:
    num_stored = store.stats().counts.stored
    store.put(at, written)
    wait_until(lambda: store.stats().counts.stored > num_stored)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
