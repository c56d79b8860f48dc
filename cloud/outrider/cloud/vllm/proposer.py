"""Switches vLLM's speculation on and drafts nothing: the scheduler puts the drafts into the requests."""

from __future__ import annotations

from typing import Any


class Empty:
    """A `custom_class` proposer of vLLM."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *_: Any) -> None:
        """Loads nothing; the CPU's runner calls it for every proposer."""

    def propose(self, sampled_token_ids: list[Any], *_: Any, **__: Any) -> list[list[int]]:
        """No drafts, one empty list a request."""
        return [[] for _ in sampled_token_ids]
