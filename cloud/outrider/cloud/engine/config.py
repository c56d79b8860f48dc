"""Configures the engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cloud.pending.policy import Policy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    max_running: sequences in one step. step_tokens: token budget of a step; a prompt is prefilled in chunks that fit.
    max_queue: sequences that may wait for admission. max_draft: drafted tokens verified per sequence and step.
    max_parked: sequences whose cache is kept for the next /v1/verify call. share_prefixes: reuse KV blocks by hash.
    """

    max_running: int = 32
    step_tokens: int = 256
    max_queue: int = 1024
    max_draft: int = 16
    max_parked: int = 64
    share_prefixes: bool = True
    policy: Policy = Policy.AUTO
