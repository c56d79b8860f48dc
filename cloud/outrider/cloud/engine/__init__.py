"""The engine: continuous batching over a paged KV cache. Synchronous and free of HTTP; `EngineThread` drives it."""
