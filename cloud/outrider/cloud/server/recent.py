"""Opens the store of recent texts that the options ask for."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Final

from outrider.cloud.recent.store import MemoryStore, RecentStore
from outrider.cloud.server.options import ServeOptions
from outrider.models.errors import ConfigError
from outrider.models.process.extras import require_packages

REDIS_VARIABLE: Final = "OUTRIDER_REDIS"


def open_recent(options: ServeOptions) -> AbstractContextManager[RecentStore | None]:
    """The store, closed at the end; None for --no-recent. Raises OutriderError."""
    if not options.recent:
        if options.redis is not None:
            raise ConfigError("--redis keeps recent texts, which --no-recent turns off; leave one of them out")
        return nullcontext()
    url = options.redis or os.environ.get(REDIS_VARIABLE)
    if not url:
        return closing(MemoryStore())
    require_packages(["redis"], "--redis", "scale")
    from outrider.cloud.recent.redis_store import RedisStore

    return closing(RedisStore(url))
