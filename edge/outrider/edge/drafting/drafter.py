"""Guesses the next token on the device: drafters with one interface.

A drafter holds one text and guesses what follows it, or any continuation of it. One worker thread at a time drives it,
and it knows no network. Its guesses are hints: whatever it proposes, the text is the target's.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from outrider.edge.drafting.cached_text import MAX_BEHIND, CachedText, Logits
from outrider.edge.drafting.calibration import (
    Guess,
    forced_guess,
    lookup_guess,
    model_guesses,
    quoted_guess,
    shared_guess,
)
from outrider.edge.drafting.draft_processors import DraftProcessors
from outrider.models.picks.sampling import SamplingParams, candidates
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan
from outrider.models.runtimes.base import BranchingRuntime, JoiningRuntime, SequenceRuntime
from outrider.models.runtimes.ngram import LONGEST_MATCH, NgramLookup, QuotedText

Propose = Callable[[Logits, SamplingParams, int], list[Guess]]
"""Makes the guesses of one row: of the token at this position."""


class Drafter(Protocol):
    """One text, and guesses of what follows its continuations. Subclasses inherit what only a model does."""

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text; forgets the one before. plan: what changes the target's rows."""

    @property
    def length(self) -> int:
        """Tokens of the text, the prompt included."""

    @property
    def max_branches(self) -> int:
        """Branches that one call of `guess` runs at the same time; further ones run one after the other."""
        return 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the target committed. They cost nothing until the next guess."""

    @property
    def is_behind(self) -> bool:
        """Whether so much of the text was not read that `guess` would take long: call `read_on` before it."""
        return False

    def read_on(self) -> None:
        """Reads the next piece of the text; `is_behind` must be true. Blocking, about a tenth of a second."""
        return None

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """Guesses of the token after each branch, at most about `width`, the draft's own pick first; [] for none.

        A branch is the tokens that follow the text; it may be empty. Blocking.
        """

    def guess_by(self, branches: Sequence[Sequence[int]], propose: Propose) -> list[list[Guess]]:
        """As `guess`, with guesses that `propose` makes of each row; none without a model."""
        return [[] for _ in branches]

    def continuation(self, max_tokens: int) -> list[Guess]:
        """A path that follows the text and costs next to nothing; [] for none."""
        return []

    def with_lookup(self, quoted: Sequence[QuotedText] = ()) -> Drafter:
        """The same drafter, which also copies earlier passages, and from `quoted`. Begin a text with it then."""
        return self

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """What runs the model in one call with others of its kind (`guess_together`); None guesses alone."""
        return None

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The guesses, given those of `guess_together` for the model."""
        return found

    def close(self) -> None:
        """Releases the model; safe to call twice."""
        return None


class ModelDrafter(Drafter):
    """Drafts with a model: its best scores, with the same noise as the target's pick at the same position.

    The runtime holds one sequence: for a branch it is cut back to the fork and extended. A `BranchingRuntime` runs
    several branches in one call. Tokens are fed to the runtime only when a guess needs them.
    """

    def __init__(
        self,
        runtime: SequenceRuntime,
        num_ids: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        model: object = None,
    ) -> None:
        """num_ids: ids that the tokenizer knows; logits beyond are padding, which the target may not have, and are
        never proposed. None: all. model: the same for drafters whose runtimes are sequences of one model.
        """
        self.model = model
        self._runtime = runtime
        self._branching = runtime if isinstance(runtime, BranchingRuntime) and runtime.max_branches > 1 else None
        # A text does not wait for a call in progress when it ends, so the model may be closed in the middle of one.
        self._lock = threading.Lock()
        self._num_ids = num_ids
        self._text = CachedText(runtime, clock)
        self._processors = DraftProcessors(())
        self._params = SamplingParams()
        self.lookup: NgramDrafter | None = None

    def with_lookup(self, quoted: Sequence[QuotedText] = ()) -> ModelDrafter:
        """A drafter with the same model and cache: only one of both has a text at a time."""
        other = copy.copy(self)
        other.lookup = NgramDrafter(quoted)
        return other

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text; keeps the cache of the beginning that both share."""
        self._text.begin(prompt)
        if self.lookup is not None:
            self.lookup.begin(prompt, params)
        self._params = params
        vocab_size = self._runtime.limits.vocab_size
        # Rows change as the target's do, or the draft would pick what the target cannot.
        self._processors = DraftProcessors(self._text.tokens, plan, min(self._num_ids or vocab_size, vocab_size))

    @property
    def length(self) -> int:
        """Tokens of the text, whether or not the runtime has seen them yet."""
        return len(self._text.tokens)

    @property
    def max_branches(self) -> int:
        """The runtime's; 1 where it runs one sequence only."""
        return self._branching.max_branches if self._branching is not None else 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._text.tokens.extend(tokens)
        if self.lookup is not None:
            self.lookup.extend(tokens)

    @property
    def is_behind(self) -> bool:
        """Whether more than a piece of the text was not read, and can be."""
        return self._text.is_behind

    def read_on(self) -> None:
        """Reads a piece; the next is larger or smaller by the time that this one took."""
        with self._lock:
            self._text.read_on()

    def guess_by(self, branches: Sequence[Sequence[int]], propose: Propose) -> list[list[Guess]]:
        """As `guess`, with guesses that `propose` makes."""
        found: list[list[Guess]] = [[] for _ in branches]
        with self._lock:
            for index in self._able(branches):
                branch = branches[index]
                row = self._processors.changed(self._text.run(branch)[: self._num_ids], branch)
                if row is not None and row.max() != -np.inf:
                    found[index] = propose(row, self._params, self.length + len(branch))
        return found

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The best scores after each branch, with their gaps.

        None of them at the model's longest sequence, and after a token that its embedding does not have: a target that
        is padded further than the draft may pick an id of its padding.
        """
        found: list[list[Guess]] = [[] for _ in branches]
        with self._lock:
            able = self._with_forced(branches, found)
            if self._branching is not None and width > 1 and able:
                able = self._run_together(self._branching, branches, able, found, width)
            for index in able:
                found[index] = self._best(self._text.run(branches[index]), branches[index], width)
        return self.complete(found, branches, width)

    def _able(self, branches: Sequence[Sequence[int]]) -> list[int]:
        """Which branches can run."""
        tokens, size = self._text.tokens, self._runtime.limits.vocab_size
        if max(tokens[self._text.agreed() :], default=0) >= size:
            return []
        room = self._runtime.limits.max_positions - len(tokens)
        return [index for index, branch in enumerate(branches) if len(branch) < room and max(branch, default=0) < size]

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """Itself, where the runtime runs branches of several sequences in one call."""
        return self if isinstance(self._runtime, JoiningRuntime) else None

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """Lookup's guesses beside the model's; one that both make counts as the model's, and as surer."""
        if self.lookup is None:
            return found
        for branch, guesses, more in zip(branches, found, self.lookup.guess(branches, width), strict=True):
            for looked_up in more:
                ranks = [index for index, guess in enumerate(guesses) if guess.token == looked_up.token]
                if ranks:
                    guesses[ranks[0]] = shared_guess(guesses[ranks[0]])
                # Beyond the model's longest sequence lookup would go on alone, token by token.
                elif guesses and self._processors.allows(branch, looked_up.token):
                    guesses.append(looked_up)
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """What the grammar forces, else lookup's; every other token of a model costs a call."""
        forced = [forced_guess(token) for token in self._processors.forced(())[:max_tokens]]
        return forced or (self.lookup.continuation(max_tokens) if self.lookup is not None else [])

    def _with_forced(self, branches: Sequence[Sequence[int]], found: list[list[Guess]]) -> list[int]:
        """Puts forced tokens into `found`; returns the branches that the model can run, and has to."""
        able = self._able(branches)
        if not self._processors.follow():
            return able
        for index in able:
            found[index] = [forced_guess(token) for token in self._processors.forced(branches[index])[:1]]
        return [index for index in able if not found[index]]

    def _best(self, logits: Logits, branch: Sequence[int], width: int) -> list[Guess]:
        row = self._processors.changed(logits[: self._num_ids], branch)
        if row is None:
            return []
        position = len(self._text.tokens) + len(branch)
        return model_guesses(candidates(row, self._params, position, width, self._processors.narrowing), width)

    def _run_together(
        self,
        runtime: BranchingRuntime,
        branches: Sequence[Sequence[int]],
        indices: Sequence[int],
        found: list[list[Guess]],
        width: int,
    ) -> list[int]:
        """Runs branches as such; the runtime's sequence stays a beginning of the text. Returns those that are left."""
        missing = self._text.cut_to_text()
        ends = [index for index in indices if not branches[index]]
        if missing and (ends or len(missing) > MAX_BEHIND):
            logits = self._text.append(missing)
            for index in ends:
                found[index] = self._best(logits, (), width)
            missing, ends = [], []
        others = [index for index in indices if branches[index]]
        for start in range(0, len(others), runtime.max_branches):
            part = others[start : start + runtime.max_branches]
            rows = runtime.extend_branches([[*missing, *branches[index]] for index in part])
            for index, row in zip(part, rows, strict=True):
                found[index] = self._best(row, branches[index], width)
        return ends

    def forget(self) -> None:
        """Forgets the text, and what the runtime holds of it."""
        with self._lock:
            self._text.forget()
            self._processors = DraftProcessors(())

    def close(self) -> None:
        """Releases the runtime, after the call in progress."""
        with self._lock:
            self._runtime.close()


def guess_together(asked: Sequence[tuple[Drafter, Sequence[Sequence[int]]]], width: int) -> list[list[list[Guess]]]:
    """What each drafter's `guess` would give for its branches, in one call of the model that all of them share.

    At most `max_branches` branches in all; only for drafters that have a `model_drafter`.
    """
    drafters = [model for drafter, _ in asked if (model := drafter.model_drafter) is not None]
    found: list[list[list[Guess]]] = [[[] for _ in branches] for _, branches in asked]
    groups: list[tuple[SequenceRuntime, list[list[int]]]] = []
    places: list[tuple[int, int]] = []  # of the rows: whose, and which branch
    with ExitStack() as stack:
        for index, (drafter, (_, branches)) in enumerate(zip(drafters, asked, strict=True)):
            stack.enter_context(drafter._lock)
            if able := drafter._with_forced(branches, found[index]):
                missing = drafter._text.catch_up()
                groups.append((drafter._runtime, [[*missing, *branches[place]] for place in able]))
                places += [(index, place) for place in able]
        if groups:
            runtime = groups[0][0]
            assert isinstance(runtime, JoiningRuntime)
            for (index, place), row in zip(places, runtime.extend_branches_of(groups), strict=True):
                found[index][place] = drafters[index]._best(row, asked[index][1][place], width)
    return [each.complete(own, branches, width) for own, (each, branches) in zip(found, asked, strict=True)]


class NgramDrafter(Drafter):
    """Drafts by prompt lookup, without a model: repeats what followed the same few tokens before.

    It also copies what follows them in `quoted`, texts that the answer may quote: whichever shares more tokens.
    """

    def __init__(self, quoted: Sequence[QuotedText] = ()) -> None:
        self._lookup = NgramLookup()
        self._quoted = tuple(quoted)

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text; ignores sampling parameters and rules."""
        self._lookup.truncate(0)
        self._lookup.extend(prompt)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self._lookup.length

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._lookup.extend(tokens)

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The token that followed the longest repeated suffix, for each branch."""
        length, found = self._lookup.length, list[list[Guess]]()
        for branch in branches:
            self._lookup.extend(branch)
            found.append(self.continuation(1))
            self._lookup.truncate(length)
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """What followed the longest repeated suffix of the text."""
        suffix, tokens = self._lookup.match(max_tokens)
        make = lookup_guess
        if self._quoted:
            tail = self._lookup.tail(LONGEST_MATCH)
            longest, quoted = max((text.match(tail, max_tokens) for text in self._quoted), key=lambda match: match[0])
            # A passage of the prompt is also in the text itself: there the document counts, and may go on further.
            if longest >= max(1, suffix):
                suffix, tokens, make = longest, quoted, quoted_guess
        return [make(token, suffix + index) for index, token in enumerate(tokens)]

    def with_lookup(self, quoted: Sequence[QuotedText] = ()) -> NgramDrafter:
        """One that copies from `quoted` too."""
        return NgramDrafter(quoted) if quoted else self
