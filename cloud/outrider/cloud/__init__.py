"""The cloud verifier: a continuous-batching engine over a paged KV cache, and its HTTP API."""
