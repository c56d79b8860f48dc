"""Reads the target's text as the tokens of a draft with another tokenizer, to train the draft on.

Of such a row only the text is known, not the target's distribution over the draft's tokens. So the next token counts as
the only one that may follow, and the divergence from that is the cross-entropy of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.export.distill.target import TargetText
from outrider.export.distill.trainer.pool import Pool, rewrite_pool
from outrider.export.distill.trainer.rollout import Rollout
from outrider.export.progress import Report, Stop
from outrider.models.runtimes.base import num_shared
from outrider.models.text.draft_text import DraftText, Place

_FITTING: Final = 0.95
"""The share of rows that are kept whole: a few with far more tokens than the others would make all rows as long."""


def write_draft_rows(
    text: TargetText, reader: DraftText, longest: int, folder: Path, report: Report, stop: Stop
) -> TargetText | None:
    """`text` with the rows of its pools in the draft's tokens, stored in `folder`, from there or written now.

    longest: the draft's positions; longer rows are cut. Passages stay in the target's ids. None if it was stopped.
    """
    read = dict[str, Pool]()
    for name in ("pool", "validation", "test"):
        pool: Pool = getattr(text, name)
        lengths = [len(row.tokens) for row in _read_rows(pool.parts[0], reader)]
        length = min(longest, max(2, int(np.quantile(lengths, _FITTING, method="higher"))))
        rewrite = partial(read_as_draft, reader=reader, length=length)
        if not rewrite_pool(pool, rewrite, folder / name, report, stop):
            return None
        read[name] = Pool(folder / name)
    return TargetText(read["pool"], read["validation"], read["test"], text.passages)


def read_as_draft(rows: Rollout, reader: DraftText, length: int) -> Rollout:
    """The rows in the draft's tokens, `length` of each at most. Starts and ends are those of the target's own text."""
    found = _read_rows(rows, reader)
    ids = torch.zeros(len(found), length, dtype=torch.int32)
    for row, each in zip(ids, found, strict=True):
        kept = each.tokens[:length]
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    ends = _int32([min(len(each.tokens), length) for each in found])
    following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)[..., None]
    return Rollout(
        ids=ids,
        starts=torch.minimum(_int32([each.start for each in found]), ends),
        ends=ends,
        temperatures=rows.temperatures,
        top_ids=following,
        top_logits=torch.zeros(following.shape, dtype=torch.float16),
        log_norms=torch.zeros(len(found), length, rows.log_norms.shape[-1]),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's draft tokens, and how many of them are the prompt's."""

    tokens: list[int]
    start: int


def _read_rows(rows: Rollout, reader: DraftText) -> list[_Row]:
    found = []
    for ids, start, end in zip(rows.ids.tolist(), rows.starts.tolist(), rows.ends.tolist(), strict=True):
        place = _advanced(reader, reader.begin, ids[:start])
        prompt = _tokens(reader, place)
        place = _advanced(reader, place, ids[start:end])
        tokens = _tokens(reader, place)
        if place.tail:
            del tokens[-1:]  # a row may end inside a word, of which more would be another token
        found.append(_Row(tokens, num_shared(prompt, tokens)))
    return found


def _advanced(reader: DraftText, place: Place, ids: Sequence[int]) -> Place:
    for index in ids:
        place = reader.advance(place, index)
    return place


def _tokens(reader: DraftText, place: Place) -> list[int]:
    return [*place.cut.since(0), *reader.split(place.tail, place.cut.at_start).tokens]


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
