"""Makes the verifier's own sources of drafts for a sequence, and passes on to them what each step showed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.engine.runner import Rows, Share
from outrider.cloud.pending.learning import HeadGuesses, NgramPool
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.sources import DraftSource, Verified
from outrider.models.errors import ConfigError
from outrider.models.picks.acceptance import AcceptedBranch
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import PickedRow, TokenLogprobs
from outrider.models.runtimes.base import BatchRuntime, HiddenRuntime


def own_sources(config: EngineConfig, text: Sequence[int], params: SamplingParams) -> Iterator[DraftSource]:
    """The sources that the engine's options name. text: the sequence's own list of tokens, which grows."""
    if config.looks_up:
        yield PromptLookup(text)
    if config.looks_ahead:
        yield NgramPool(text)
    if config.heads is not None:
        yield HeadGuesses(config.heads, params, text)


def require_hidden(runtime: BatchRuntime, config: EngineConfig) -> None:
    """Raises ConfigError for heads that are not of this runtime's model, or a runtime that keeps no hidden states."""
    if config.heads is None:
        return
    if not isinstance(runtime, HiddenRuntime) or runtime.hidden_size is None:
        raise ConfigError(
            "draft heads need the target's hidden states, which this runtime does not keep; leave out --source heads"
        )
    found, expected = (config.heads.hidden_size, config.heads.vocab_size), runtime.hidden_size
    if found != (expected, runtime.limits.vocab_size):
        raise ConfigError(
            f"the draft heads take {found[0]} numbers and know {found[1]} tokens, the target has {expected} and "
            f"{runtime.limits.vocab_size}; train heads for this target"
        )


def teach(share: Share, branch: AcceptedBranch, rows: Rows, hidden: NDArray[np.float32] | None) -> None:
    """Shows a pass to the sources that learn. Call it before the tokens are part of the text."""
    tokens, learning = share.sequence.tokens, share.sequence.drafts.sources.learning
    if not learning:
        return
    verified = Verified(tokens, branch.tokens, share.drafted, branch.nodes, [_likeliest(row) for row in rows], hidden)
    for source in learning:
        source.learn(verified)


def _likeliest(row: PickedRow) -> int | None:
    """The pick that the runtime made, or the likeliest token of a row that it left whole; None where it is not finite.

    Picking by noise where the token is not committed would cost a row's sorting.
    """
    if row is None or isinstance(row, int):
        return row
    if isinstance(row, TokenLogprobs):
        return row.token
    best = int(row.argmax())  # NaN is what argmax finds first
    return best if np.isfinite(row[best]) else None
