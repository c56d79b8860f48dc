"""Plays drafts of one chain event by event: the twin of the closed forms of report cards and of the policy."""

from __future__ import annotations

import heapq
import random

from outrider.models.bundle.speed_up import Setting, best_depth


class Simulation:
    """Drafts streamed to a target that waits up to `patience_ms` until it holds `wanted` drafted tokens."""

    def __init__(self, setting: Setting, patience_ms: float, wanted: int, window: int = 32, seed: int = 0) -> None:
        self._setting, self._patience_ms, self._wanted, self._window = setting, patience_ms, wanted, window
        self._random, self._depths = random.Random(seed), dict[int, int]()
        self._events, self._order = list[tuple[float, int, str, object]](), 0
        # The server.
        self._committed = self._passes = 0
        self._pending, self._is_busy = list[bool](), False
        self._deadline: float | None = None
        # The device.
        self._known = self._epoch = 0
        self._belief, self._is_drafting = list[bool](), False

    def run(self, num_tokens: int = 3000) -> tuple[float, float]:
        """ms per token and passes per token."""
        self._draft(0.0)
        self._serve(0.0)
        now = 0.0
        while self._committed < num_tokens:
            now, _, kind, data = heapq.heappop(self._events)
            match kind, data:
                case "drafted", int(epoch) if epoch == self._epoch:
                    self._on_drafted(now)
                case "arrived", (int(base), list(flags)):
                    self._on_arrived(now, base, flags)
                case "timeout", int(committed) if committed == self._committed:
                    self._serve(now)
                case "stepped", int(depth):
                    self._on_stepped(now, depth)
                case "commit", int(committed):
                    self._on_commit(now, committed)
        return now / self._committed, self._passes / self._committed

    def _push(self, at: float, kind: str, data: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, data))

    def _serve(self, now: float) -> None:
        if self._is_busy:
            return
        if len(self._pending) < self._wanted and self._patience_ms:
            if self._deadline is None:
                self._deadline = now + self._patience_ms
                self._push(self._deadline, "timeout", self._committed)
                return
            if now < self._deadline:
                return
        self._deadline, self._is_busy = None, True
        self._passes += 1
        available = len(self._pending)
        depth = self._depths.setdefault(available, best_depth(self._setting, available))
        self._push(now + self._setting.step_ms + self._setting.extra_ms * depth, "stepped", depth)

    def _draft(self, now: float) -> None:
        if not self._is_drafting and len(self._belief) < self._window:
            self._is_drafting = True
            self._push(now + self._setting.draft_ms, "drafted", self._epoch)

    def _on_drafted(self, now: float) -> None:
        self._is_drafting = False
        self._belief.append(all(self._belief) and self._random.random() < self._setting.alpha)
        self._push(now + self._setting.rtt_ms / 2, "arrived", (self._known, list(self._belief)))
        self._draft(now)

    def _on_arrived(self, now: float, base: int, flags: list[bool]) -> None:
        overlap = self._committed - base
        if len(flags) - overlap > len(self._pending) and all(flags[:overlap]):
            self._pending[:] = flags[overlap:]
            self._serve(now)

    def _on_stepped(self, now: float, depth: int) -> None:
        self._is_busy = False
        right = 0
        while right < depth and self._pending[right]:
            right += 1
        rest = self._pending[right:]
        self._pending = rest[1:] if right == depth and rest and rest[0] else []
        self._committed += right + 1
        self._push(now + self._setting.rtt_ms / 2, "commit", self._committed)
        self._serve(now)

    def _on_commit(self, now: float, committed: int) -> None:
        gained = committed - self._known
        if len(self._belief) >= gained and all(self._belief[:gained]):
            del self._belief[:gained]
        else:
            self._belief.clear()
            self._epoch += 1
            self._is_drafting = False
        self._known = committed
        self._draft(now)
