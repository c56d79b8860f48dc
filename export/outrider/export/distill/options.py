"""Holds the user's options of a training, checked before any work. Loads no model library."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from outrider.models.errors import ConfigError

TargetDtype = Literal["bf16", "fp32"]
TrainingDevice = Literal["auto", "cpu", "cuda"]
DEFAULT_MINUTES: Final = 30.0
_NOT_OF_THE_RESULT: Final = (
    *("overwrite", "force", "resume", "work", "num_threads", "is_compiled", "device", "heldout"),
    "same_tokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What every training has. heldout: the share of the prompts that is held out, or a file of such prompts.

    minutes, steps: of training, one of the two. tokens: of the target's text to train on. row_length: tokens per row,
    prompt included; prompts take at most half of it. rate: peak learning rate, in AdamW's terms. is_chat: each prompt
    is a user message and gets the target's chat template. Raises ConfigError for invalid values.
    """

    heldout: float | Path = 0.1
    minutes: float | None = None
    steps: int | None = None
    tokens: int = 500_000
    row_length: int = 256
    rate: float = 3e-4
    seed: int = 0
    is_chat: bool = False
    target_dtype: TargetDtype = "bf16"
    device: str = "auto"
    num_threads: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "steps", "tokens", "rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value}; expected a number above 0")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"the seed is {self.seed}; expected a number from 0 to {2**32 - 1}")
        if self.row_length < 16:
            raise ConfigError(f"the row length is {self.row_length}; expected at least 16 tokens")
        if isinstance(self.heldout, float) and not 0.0 < self.heldout <= 0.5:
            raise ConfigError(f"the share held out is {self.heldout:g}; expected up to 0.5, or a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions(TrainingOptions):
    """How a draft is distilled; without minutes and steps it is trained for half an hour.

    temperatures: at which the draft is trained; text is sampled between the lowest and the highest. kl, match,
    cross_entropy: weights of the parts of the loss (match 0: divergence throughout). device: a `TrainingDevice`. work:
    directory of the state, instead of beside the output; the pool stays there afterwards. resume: continue a state of
    the same inputs. force: write a draft whose acceptance fell. same_tokenizer: refuse a draft with another tokenizer
    than the target's. Raises ConfigError for invalid values.
    """

    temperatures: tuple[float, ...] = (0.5, 0.8, 1.0)
    kl: float = 1.0
    match: float = 2.0
    cross_entropy: float = 0.1
    is_compiled: bool = True
    resume: bool = True
    work: Path | None = None
    overwrite: bool = False
    force: bool = False
    same_tokenizer: bool = False

    def __post_init__(self) -> None:
        if self.minutes is not None and self.steps is not None:
            raise ConfigError(f"both {self.minutes:g} minutes and {self.steps} steps were given; expected one of them")
        TrainingOptions.__post_init__(self)
        if not self.temperatures or not all(0.05 <= t <= 5.0 for t in self.temperatures):
            raise ConfigError(
                f"the temperatures are {self.temperatures}; expected numbers between 0.05 and 5 (greedy text is always "
                "measured, and low temperatures train for it)"
            )
        weights = (self.kl, self.match, self.cross_entropy)
        if not all(weight >= 0.0 and math.isfinite(weight) for weight in weights) or not self.kl + self.cross_entropy:
            raise ConfigError(
                f"the weights of KL, match and cross-entropy are {weights}; expected none below 0, and KL or "
                "cross-entropy above 0"
            )

    @property
    def training_minutes(self) -> float | None:
        """Minutes to train; None where steps are counted."""
        return DEFAULT_MINUTES if self.minutes is None and self.steps is None else self.minutes

    def of_the_result(self) -> dict[str, Any]:
        """The options that decide the result, JSON-able; held-out prompts are identified by their own hash."""
        kept = {name: value for name, value in asdict(self).items() if name not in _NOT_OF_THE_RESULT}
        return kept | {"minutes": self.training_minutes, "temperatures": list(self.temperatures)}
