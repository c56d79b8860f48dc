"""Measures what an export lost: its logits against those of the unquantized model on held-out text.

Unlike the parity check it decides nothing: it is a figure of the report card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.export.check.parity import Steps, log_softmax, rounded
from outrider.models.manifest import Agreement


def measure_agreement(
    steps: Steps, texts: Sequence[Sequence[int]], expected: Sequence[NDArray[np.float32]], *, num_ids: int
) -> Agreement:
    """Share of equal argmaxes and mean KL from the source, over every position of `texts`.

    expected: the source's logits of each text, [length, vocab_size]. num_ids: ids that the tokenizer knows; columns
    beyond are padding. Tokens go in one at a time, as they do when a model drafts.
    """
    num_equal = num_rows = 0
    divergence = 0.0
    for text, truth in zip(texts, expected, strict=True):
        steps.truncate(0)
        for index, logits in enumerate(truth):
            found = steps.run(text[index : index + 1], 1)[:, :num_ids]
            log_p, log_q = log_softmax(logits[None, :num_ids]), log_softmax(found)
            num_equal += int(found.argmax() == logits[:num_ids].argmax())
            divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
            num_rows += 1
    # Rounding can leave a sum a hair below zero, where no divergence is.
    return Agreement(
        rows=num_rows, argmax=rounded(num_equal / num_rows), mean_kl=rounded(max(0.0, divergence / num_rows))
    )
