"""What the engine has done since its start, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counts and seconds; a pass is one sequence's share of a step that committed tokens."""

    steps: int = 0
    step_tokens: int = 0
    committed: int = 0
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    preempted: int = 0
    finished: int = 0
    faults: int = 0
    prefix_hits: int = 0
    waited_s: float = 0.0
    model_s: float = 0.0
    overhead_s: float = 0.0

    def count_step(self, num_tokens: int, *, model_s: float, overhead_s: float) -> None:
        """One step of the engine: time inside the model, and around it."""
        self.steps += 1
        self.step_tokens += num_tokens
        self.model_s += model_s
        self.overhead_s += overhead_s

    def count_pass(self, committed: int, proposed: int, accepted: int) -> None:
        """One sequence's pass."""
        self.passes += 1
        self.committed += committed
        self.proposed += proposed
        self.accepted += accepted
