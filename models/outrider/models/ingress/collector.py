"""Tunes Python's garbage collector for a process that serves many small requests beside a model."""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 20_000


def relieve_collector() -> None:
    """Exempts what is loaded now from collection, and collects young objects less often. Call it when all is loaded.

    Modules, tokenizer and routes are some 200,000 objects that live as long as the process, and a full collection
    visits each. A request leaves about 15 objects in cycles, so what waits for collection stays within a few megabytes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
