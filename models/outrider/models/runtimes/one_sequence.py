"""Holds what every `SequenceRuntime` shares, and finds how long a model's sequences may be.

Knows no model library and no cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import ModelLimits, RuntimeOptions

FIRST_POSITIONS: Final = 2048
"""Positions of a cache at first, before a sequence needs more. A model's longest sequence may need gigabytes (8.6 GB
for a Llama of 1B parameters in FP32), and few texts come near it."""

_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


class OneSequence:
    """The state of one sequence whose cache is cut back by counting: rollback is a smaller length. limits: of the model
    as it is loaded.
    """

    full_advice: ClassVar = "stop earlier"

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens now in the cache."""
        return self._length

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` is at most the present one. Touches no tensor."""
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length} tokens"
        self._length = length

    def _check_new(self, tokens: Sequence[int]) -> None:
        """Asserts at least one token, all in the vocabulary. Raises ConfigError when they do not fit."""
        assert len(tokens) and min(tokens) >= 0 and max(tokens) < self.limits.vocab_size, f"token ids {tokens}"
        if (end := self._length + len(tokens)) > self.limits.max_positions:
            raise ConfigError(
                f"{end} tokens do not fit the {self.limits.max_positions} positions of this runtime; {self.full_advice}"
            )


def cache_positions(needed: int, held: int, longest: int) -> int:
    """Positions of a cache for `needed`, up to `longest`: at least twice those `held`, so that it seldom grows."""
    return min(longest, max(needed, 2 * held, FIRST_POSITIONS))


def longest_sequence(directory: Path, options: RuntimeOptions) -> int:
    """The model's longest sequence, from its config.json, cut to `options.max_positions`.

    Raises ConfigError when neither gives one.
    """
    config = directory / "config.json"
    own = 0
    if config.is_file():
        fields = json.loads(config.read_text(encoding="utf-8"))
        fields = fields.get("text_config", fields)
        own = next((int(fields[key]) for key in _LENGTH_KEYS if fields.get(key)), 0)
    if not own and not options.max_positions:
        raise ConfigError(f"{config} does not give {_LENGTH_KEYS[0]}; set max_positions in the options")
    return min(own or options.max_positions, options.max_positions or own)
