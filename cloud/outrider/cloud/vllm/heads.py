"""Drafts with the target's own heads (MTP, EAGLE), by vLLM's proposer: one more source beside the device's drafts.

vLLM's proposer runs after a step, for all of its sequences, and keeps its own keys and values in step with the target
whether or not it drafts. So for each step only the number of tokens is chosen: `NUM_DRAFTED`, or none. They reach the
scheduler behind the step's tokens, and rival the device's drafts by their measured chances (`pending.drafting`): where
a device has sent nothing, or less, they are verified. Knows no vLLM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.sources import DraftSource, expected_gain
from outrider.cloud.pending.trie import HEAD_KINDS
from outrider.models.errors import ConfigError

MTP: Final = "mtp"
"""The value of the option for heads that are among the target's own weights."""
NUM_DRAFTED: Final = 4
"""Tokens that the heads draft after a step; each is a pass of a small model, and the fifth is seldom reached."""

_KIND: Final = HEAD_KINDS[0]
"""Of all their tokens: a proposer gives no probabilities, and one that follows accepted ones is as likely as the first.
"""
_MEMORY: Final = 0.7
"""Of what the heads were expected to gain, for a newer step."""
_TRIED_EVERY: Final = 64
"""Steps without heads, of which one has them all the same, so that the chances of their drafts are measured."""


def heads_config(heads: str, max_draft: int, max_num_seqs: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for heads that draft. heads: MTP, or their directory.

    Raises ConfigError for a directory that holds no EAGLE heads.
    """
    config: dict[str, Any] = {
        "method": MTP,
        "num_speculative_tokens": max_draft,
        # For each number of sequences. V2 captures the drafter's passes in one CUDA graph: else always all `max_draft`.
        "num_speculative_tokens_per_batch_size": [[1, max_num_seqs, min(NUM_DRAFTED, max_draft)]],
    }
    if heads != MTP:
        config |= {"method": _method_of(Path(heads)), "model": str(Path(heads).resolve())}
    return config


def _method_of(path: Path) -> str:
    """vLLM's name for the kind of heads in a directory that was checked as a target's is."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    names = " ".join(map(str, config.get("architectures") or ())).lower()
    if "eagle" not in names:
        raise ConfigError(
            f"{path} holds {names or 'no architecture'}, not EAGLE heads; for heads among the target's own weights "
            f"give --vllm-option heads={MTP}"
        )
    return "eagle3" if "eagle3" in names else "eagle"


class HeadDrafts(DraftSource):
    """What the heads drafted last for one sequence. committed: its tokens; read, never changed, only grows."""

    kinds = HEAD_KINDS
    rivals_device = True

    def __init__(self, committed: Sequence[int]) -> None:
        self._committed = committed
        self._tokens: list[int] = []
        self._length = -1  # of the text that they follow

    def take(self, tokens: Sequence[int]) -> None:
        """Keeps the tokens that follow the text as it is now."""
        self._tokens, self._length = list(tokens), len(self._committed)

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """At most `most` of the newest draft's tokens, and their kinds; nothing where the text has gone on since."""
        if self._length != len(self._committed):
            return [], []
        tokens = self._tokens[:most]
        return tokens, [_KIND] * len(tokens)


class Heads:
    """Decides after which steps the heads draft: where what they are expected to gain over the device's drafts is worth
    the time that they take, which is measured at the start.
    """

    def __init__(self, max_draft: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_draft = max_draft
        self._most = min(NUM_DRAFTED, max_draft)
        self._clock = clock
        self._with = self._without = 0.0  # tokens of a step
        self._num_without = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # of the start's steps, with heads or without
        self._began: float | None = None  # when the last step was one of these
        self.num_drafted = 0
        """Tokens that they draft after the present step."""

    def draft_after(self, sequences: Sequence[PendingDrafts], *, is_probing: bool) -> int:
        """How many tokens the heads draft after the step that begins now. sequences: those that commit in it and may
        use them. is_probing: it is one of the start's, all of one kind.
        """
        began, self._began = self._began, None
        if is_probing:
            self._began = self._clock()
            if began is not None:
                self._seconds[self.num_drafted > 0].append(self._began - began)
            drafts = not self.num_drafted
        else:
            drafts = self._pay(sequences)
        self.num_drafted = self._most if drafts else 0
        return self.num_drafted

    def _pay(self, sequences: Iterable[PendingDrafts]) -> bool:
        tokens = gained = 0.0
        for drafts in sequences:
            of_device = drafts.gain_of_device(self._max_draft) if drafts.trie.has_device_nodes else 0.0
            of_heads = expected_gain([drafts.chances.rates()[_KIND]] * self._most)
            tokens += 1.0 + of_device
            gained += max(0.0, of_heads - of_device)
        if not tokens:
            return False
        self._with = _MEMORY * self._with + tokens + gained
        self._without = _MEMORY * self._without + tokens
        pays = self._with > self.ratio * self._without or self._num_without >= _TRIED_EVERY
        self._num_without = 0 if pays else self._num_without + 1
        return pays

    @property
    def ratio(self) -> float:
        """How much longer a step is with the heads' drafts than without; 1 before both were measured."""
        drafting, others = self._seconds[True], self._seconds[False]
        return median(drafting) / median(others) if drafting and others else 1.0


def drafts_of_heads(drafts: PendingDrafts) -> HeadDrafts | None:
    """The source of a sequence that the heads draft for; None for others."""
    return next((source for source in drafts.sources if isinstance(source, HeadDrafts)), None)
