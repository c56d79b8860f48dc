"""Runs a draft with another tokenizer than the target's: takes the target's ids, and gives scores of them.

A `SequenceRuntime` in front of any other. What the target's ids write is read as the draft's own tokens
(`text.draft_text`), and the draft's rows are turned into scores of ids (`mapped_scores`). Most ids of a text cost one
or two rows of the draft: rows are kept, and where its runtime branches, several run in one call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from outrider.models.runtimes.base import (
    BranchingRuntime,
    JoiningRuntime,
    ModelLimits,
    SequenceRuntime,
    ShareableRuntime,
    num_shared,
)
from outrider.models.runtimes.mapped_scores import (
    Context,
    KeptRow,
    Row,
    chances_of,
    contexts_of,
    covers_of,
    write_scores,
)
from outrider.models.text.draft_text import Cut, Place, common_cut
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

_KEPT_BYTES: Final = 16 << 20
"""Of rows that are kept of a text."""
_ROOM: Final = 256
"""Tokens that are kept free for branches."""
_NO_BOUND: Final = 1 << 40
_KEPT_MAPS: Final = 2
_maps: dict[Hashable, VocabularyMap] = {}
_making = threading.Lock()


class _Rows:
    """The rows of the latest contexts, as many as may be kept."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_bytes = 0
        self._rows: OrderedDict[int, KeptRow] = OrderedDict()

    def find(self, context: Context) -> KeptRow | None:
        found = self._rows.get(context.key)
        if found is not None:
            self._rows.move_to_end(context.key)
        return found

    def keep(self, context: Context, logits: Row) -> KeptRow:
        kept = KeptRow(logits[: self._num_tokens])
        if (before := self._rows.pop(context.key, None)) is not None:
            self._num_bytes -= before.num_bytes
        self._rows[context.key] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > _KEPT_BYTES:
            self._num_bytes -= self._rows.popitem(last=False)[1].num_bytes
        return kept


class _DraftSequence:
    """The draft's own sequence: the tokens of `_held` from number `_start` on, and then those of `_over`.

    A text that is longer than the draft's positions is begun again at its later half.
    """

    def __init__(self, runtime: SequenceRuntime, num_tokens: int) -> None:
        self.runtime = runtime
        self.branching = runtime if isinstance(runtime, BranchingRuntime) and runtime.max_branches > 1 else None
        self.joins = isinstance(runtime, JoiningRuntime)
        self.rows = _Rows(num_tokens)
        self.num_run = 0
        self._num_tokens = num_tokens
        self._held: Cut | None = None
        self._over: list[int] = []
        self._start = 0

    def forget(self) -> None:
        """Forgets all that is kept of a text."""
        self.runtime.truncate(0)
        self.rows = _Rows(self._num_tokens)
        self._held, self._over, self._start = None, [], 0

    def hold(self, cut: Cut) -> None:
        """Moves to the end of a cut. Branches of the runtime stay known where the sequence only grows."""
        most = self.runtime.limits.max_positions
        start = self._start
        if cut.length + _room(most) - start > most or (start and cut.length - start < most // 8):
            start = _start_of(cut.length, most)
        base = common_cut(self._held, cut) if self._held is not None and start == self._start else None
        if base is None or base.length < start:  # another text, or another part of it
            start = _start_of(cut.length, most)
            self._cut_to(0)
            self._held, self._start, kept = None, start, start
        else:
            kept = base.length
            if kept < self._num_held:
                self._cut_to(kept - start)
            self._held = base
        new = cut.since(kept)
        shared = num_shared(self._over, new)
        if shared < len(new):
            self._cut_to(kept - start + shared)
            self._held = None  # until the call has succeeded nothing is known to be held
            logits = self.runtime.extend(new[shared:])
            self.num_run += 1
            self.rows.keep(Context(cut.key, cut, ()), logits)
            shared = len(new)
        self._over = self._over[shared:]
        self._held = cut

    @property
    def _num_held(self) -> int:
        return self._held.length if self._held is not None else self._start

    def _cut_to(self, length: int) -> None:
        """Cuts the runtime's sequence, and `_over` with it."""
        if length < self.runtime.length:
            self.runtime.truncate(length)
        del self._over[max(0, length - (self._num_held - self._start)) :]

    def branches(self, contexts: Sequence[Context]) -> list[list[int]]:
        """The tokens that lead to each context from the sequence, which is cut back where it must be; maybe none."""
        base = self._held if self._held is not None else contexts[0].cut
        for context in contexts:
            base = common_cut(base, context.cut)
        if base is not self._held:
            self.hold(base)
        return [[*context.cut.since(base.length), *context.tokens] for context in contexts]

    def has_room(self, branch: Sequence[int]) -> bool:
        """Whether a branch fits behind the sequence."""
        return self._num_held - self._start + len(branch) <= self.runtime.limits.max_positions

    def run(self, branch: list[int]) -> Row | None:
        """Runs one branch in the sequence itself; None for a text without tokens."""
        base = self._num_held - self._start
        shared = num_shared(self._over, branch)
        if shared == len(branch):
            shared -= 1  # the logits after its last token are gone: run that again
        if base + shared < 0:
            return None
        if shared < 0:
            assert self._held is not None
            held, again = self._held, self._held.since(self._held.length - 1)
            self._cut_to(base - 1)
            self._held = None  # until the call has succeeded nothing is known to be held
            last: Row = self.runtime.extend(again)
            self._held = held
            return last
        self._cut_to(base + shared)
        row: Row = self.runtime.extend(branch[shared:])
        self._over = list(branch)
        return row


class MappedSequence:
    """One text of a target's ids, and its branches, run by a draft with another tokenizer.

    Rows hold -inf for ids that are not scored, which may be all. Positions have no bound: of a text that is too long
    for it the draft reads the end. Closing it closes the runtime.
    """

    def __init__(self, runtime: SequenceRuntime, mapping: VocabularyMap) -> None:
        self.mapping = mapping
        self.draft = _DraftSequence(runtime, mapping.num_tokens)
        self._places = [mapping.text.begin]
        self._num_given = 0
        self.limits = ModelLimits(mapping.num_ids, _NO_BOUND)

    @property
    def length(self) -> int:
        """Ids of the text."""
        return len(self._places) - 1

    @property
    def max_branches(self) -> int:
        """The runtime's; 1 where it runs one sequence only."""
        return self.draft.branching.max_branches if self.draft.branching is not None else 1

    def extend(self, tokens: Sequence[int]) -> Row:
        """Appends at least one id; returns scores after the last, [num_ids] float32. Raises as the draft's runtime."""
        places = self._advanced(self._places[-1], tokens)
        self.draft.hold(places[-1].cut)
        scores = _rows_of([(self, places[-1])])
        self._places += places
        row: Row = scores[0]
        return row

    @property
    def rows_per_id(self) -> float:
        """How many rows of the draft were run for a row of scores, up to now."""
        return self.draft.num_run / max(1, self._num_given)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on. The draft's sequence is cut back when it has to be; at 0, where
        another text may follow, nothing of this one is kept.
        """
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length} ids"
        del self._places[length + 1 :]
        if not length:
            self.draft.forget()
            self.mapping.forget()

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> Row:
        """Scores after each branch of the text, which stays as it is: [B, num_ids] float32."""
        return self.extend_branches_of([(self, branches)])

    def extend_branches_of(self, groups: Sequence[tuple[SequenceRuntime, Sequence[Sequence[int]]]]) -> Row:
        """As `extend_branches` for each of these texts, whose drafts are sequences of one model."""
        asked = []
        for text, branches in groups:
            assert isinstance(text, MappedSequence)
            asked += [(text, text._advanced(text._places[-1], branch)[-1]) for branch in branches]
        return _rows_of(asked)

    def close(self) -> None:
        """Closes the draft's sequence."""
        self.draft.runtime.close()

    def _advanced(self, place: Place, tokens: Sequence[int]) -> list[Place]:
        places = []
        for token in tokens:
            place = self.mapping.text.advance(place, token)
            places.append(place)
        return places


class SharedMappedSequence(MappedSequence):
    """One whose draft's model holds several sequences."""

    def open_sequence(self) -> SharedMappedSequence:
        """Another, empty text of the same draft; close it before this one. Raises as the draft's runtime."""
        runtime = self.draft.runtime
        assert isinstance(runtime, ShareableRuntime)
        return SharedMappedSequence(runtime.open_sequence(), self.mapping)


def mapped(runtime: SequenceRuntime, target: Tokenizer, draft: Tokenizer) -> SequenceRuntime:
    """The runtime of a draft, which takes and scores the ids of a target; itself where both have one tokenizer."""
    if target.fingerprint == draft.fingerprint:
        return runtime
    mapping = _map_of(target, draft)
    kind = SharedMappedSequence if isinstance(runtime, ShareableRuntime) else MappedSequence
    return kind(runtime, mapping)


def _map_of(target: Tokenizer, draft: Tokenizer) -> VocabularyMap:
    """A map that this process has made, or a new one: that takes half a second at 150,000 ids."""
    key = tuple((each.fingerprint, each.bos_token_id, each.eos_token_ids) for each in (target, draft))
    with _making:
        if (mapping := _maps.pop(key, None)) is None:
            mapping = VocabularyMap(target, draft)
        _maps[key] = mapping
        while len(_maps) > _KEPT_MAPS:
            del _maps[next(iter(_maps))]
    return mapping


def _rows_of(asked: Sequence[tuple[MappedSequence, Place]]) -> Row:
    """Scores after these places of texts of one draft: [n, num_ids] float32."""
    mapping = asked[0][0].mapping
    out = np.empty((len(asked), mapping.num_ids), np.float32)
    plans = [covers_of(mapping, place) for _, place in asked]
    rows = _find_rows(
        (text.draft, context) for (text, _), covers in zip(asked, plans, strict=True) for context in contexts_of(covers)
    )
    none = dict[int, KeptRow]()  # where a text has no token yet
    found = [
        chances_of(mapping, covers, rows.get(text.draft, none)) for (text, _), covers in zip(asked, plans, strict=True)
    ]
    rows = _find_rows(
        (text.draft, each.ahead.context) for (text, _), each in zip(asked, found, strict=True) if each.ahead is not None
    )
    for (text, place), each, scores in zip(asked, found, out, strict=True):
        behind = rows.get(text.draft, none).get(each.ahead.context.key) if each.ahead is not None else None
        write_scores(mapping, place.last, each, behind, scores)
        text._num_given += 1
    return out


def _find_rows(wanted: Iterable[tuple[_DraftSequence, Context]]) -> dict[_DraftSequence, dict[int, KeptRow]]:
    """The rows of these contexts by sequence and key; runs those that are not kept, if they fit."""
    found: dict[_DraftSequence, dict[int, KeptRow]] = {}
    missing: dict[_DraftSequence, dict[int, Context]] = {}
    for draft, context in wanted:
        kept = draft.rows.find(context)
        if kept is None:
            missing.setdefault(draft, {})[context.key] = context
        else:
            found.setdefault(draft, {})[context.key] = kept
    for draft, context, row in _run({draft: tuple(lacking.values()) for draft, lacking in missing.items()}):
        found.setdefault(draft, {})[context.key] = draft.rows.keep(context, row)
        draft.num_run += 1
    return found


def _run(missing: Mapping[_DraftSequence, Sequence[Context]]) -> Iterator[tuple[_DraftSequence, Context, Row]]:
    """The draft's rows after these contexts, as they come; a row may be reused by the next."""
    together: list[tuple[_DraftSequence, Context, list[int]]] = []
    for draft, unordered in missing.items():
        contexts = sorted(unordered, key=lambda each: each.length)
        for context, branch in zip(contexts, draft.branches(contexts), strict=True):
            if not draft.has_room(branch):
                continue
            if branch and draft.branching is not None:
                together.append((draft, context, branch))
            elif (row := draft.run(branch)) is not None:
                yield draft, context, row
    while together:
        first = together[0][0]
        assert first.branching is not None
        part = [each for each in together[: first.branching.max_branches] if first.joins or each[0] is first]
        if first.joins:
            assert isinstance(first.runtime, JoiningRuntime)
            found = first.runtime.extend_branches_of([(draft.runtime, [branch]) for draft, _, branch in part])
        else:
            found = first.branching.extend_branches([branch for _, _, branch in part])
        for (draft, context, _), row in zip(part, found, strict=True):
            yield draft, context, row
        del together[: len(part)]


def _start_of(length: int, most: int) -> int:
    """The first token that a draft of `most` positions holds of a text: later for longer ones, in steps of half."""
    over = length + _room(most) - most
    return -(-over // (most // 2)) * (most // 2) if over > 0 else 0


def _room(most: int) -> int:
    return min(_ROOM, most // 4)
