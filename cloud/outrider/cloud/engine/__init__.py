"""The embedded engine: continuous batching over a paged KV cache. Knows no HTTP; an `EngineThread` runs by itself."""

from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.engine.engine import Engine
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.pending.policy import Policy

__all__ = ["Engine", "EngineConfig", "EngineThread", "Policy"]
