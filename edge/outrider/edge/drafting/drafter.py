"""Guesses the next token on the device: drafters with one interface.

A drafter holds one text and guesses what follows it, or any continuation of it. One worker thread at a time drives it,
and it knows no network. Its guesses are hints: whatever it proposes, the text is the target's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.edge.drafting.calibration import (
    Guess,
    forced_guess,
    lookup_guess,
    model_guesses,
    quoted_guess,
    shared_guess,
)
from outrider.models.errors import RequestError
from outrider.models.grammar.rows import GrammarRows
from outrider.models.picks.sampling import SamplingParams, SurvivorFilter, candidates
from outrider.models.processors.base import LogitProcessor, apply_all
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan
from outrider.models.runtimes.base import BranchingRuntime, JoiningRuntime, PromptRuntime, Reading, SequenceRuntime
from outrider.models.runtimes.ngram import LONGEST_MATCH, NgramLookup, QuotedText

Logits = NDArray[np.float32]
_MAX_BEHIND = 32
"""Tokens by which a branching runtime's sequence may be behind the text. Committed tokens have run as branches already;
to take them over, the last of them runs again.
"""
_FIRST_PIECE: Final = 64
_LEAST_PIECE: Final = 16
_MOST_PIECE: Final = 1024
_PIECE_S: Final = 0.1
"""A long text is read in pieces of about this time: between two of them it can be left."""


Propose = Callable[[Logits, SamplingParams, int], list[Guess]]
"""Makes the guesses of one row: of the token at this position."""


class Drafter(Protocol):
    """One text, and guesses of what follows its continuations."""

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text; forgets the one before. plan: what changes the target's rows."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the text, the prompt included."""
        ...

    @property
    def max_branches(self) -> int:
        """Branches that one call of `guess` runs at the same time; further ones run one after the other."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the target committed. They cost nothing until the next guess."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether so much of the text was not read that `guess` would take long: call `read_on` before it."""
        ...

    def read_on(self) -> None:
        """Reads the next piece of the text; `is_behind` must be true. Blocking, about a tenth of a second."""
        ...

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """Guesses of the token after each branch, at most about `width`, the draft's own pick first; [] for none.

        A branch is the tokens that follow the text; it may be empty. Blocking.
        """
        ...

    def continuation(self, max_tokens: int) -> list[Guess]:
        """A path that follows the text and costs next to nothing; [] for none."""
        ...

    def close(self) -> None:
        """Releases the model; safe to call twice."""
        ...


@runtime_checkable
class ProposingDrafter(Drafter, Protocol):
    """A Drafter whose rows can be had: with a model."""

    def guess_by(self, branches: Sequence[Sequence[int]], propose: Propose) -> list[list[Guess]]:
        """As `guess`, with guesses that `propose` makes of each row."""
        ...


@runtime_checkable
class JoiningDrafter(Protocol):
    """A Drafter that can guess in one call with others of its model: see `guess_together`."""

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """What runs the model; None where its runtime takes one sequence per call."""
        ...

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The guesses, given those of the model."""
        ...


class ModelDrafter:
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
        self._prompts = runtime if isinstance(runtime, PromptRuntime) else None
        self._clock = clock
        self._piece = _FIRST_PIECE
        # A text does not wait for a call in progress when it ends, so the model may be closed in the middle of one.
        self._lock = threading.Lock()
        self._branching = runtime if isinstance(runtime, BranchingRuntime) else None
        self._num_ids = num_ids
        self._text: list[int] = []
        self._held: list[int] = []  # what the runtime holds: a beginning of the text, perhaps with a branch after it
        self._num_agreed = 0  # first tokens of `_held` that are known to be the text's
        self._params = SamplingParams()
        self._states: list[LogitProcessor] = []
        self._narrowing: SurvivorFilter | None = None
        self._num_ruled = 0  # tokens of the text that the states have seen

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text; keeps the cache of the beginning that both share."""
        self._text = list(prompt)
        self._num_agreed = 0
        self._params = params
        limits = self._runtime.limits
        # Rows change as the target's do, or the draft would pick what the target cannot.
        try:
            self._states = plan.states(prompt, min(self._num_ids or limits.vocab_size, limits.vocab_size))
        except RequestError:  # a text that is outside its grammar already: the target decides
            self._states = []
        self._narrowing = plan.narrowing
        self._num_ruled = len(prompt)

    @property
    def length(self) -> int:
        """Tokens of the text, whether or not the runtime has seen them yet."""
        return len(self._text)

    @property
    def max_branches(self) -> int:
        """The runtime's; 1 where it runs one sequence only."""
        return self._branching.max_branches if self._branching is not None else 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._text.extend(tokens)

    @property
    def is_behind(self) -> bool:
        """Whether more than a piece of the text was not read, and can be."""
        if len(self._text) - self._agree() <= _LEAST_PIECE:
            return False
        reading = self._reading()
        if len(self._text) - reading.kept <= reading.size:
            return False
        limits = self._runtime.limits
        return len(self._text) < limits.max_positions and max(self._text[reading.kept :]) < limits.vocab_size

    def read_on(self) -> None:
        """Reads a piece; the next is larger or smaller by the time that this one took."""
        with self._lock:
            kept, size = self._reading()
            self._cut(kept)
            before = self._clock()
            piece = self._text[kept : kept + size]
            self._runtime.extend(piece)
            self._held += piece
            took_s = self._clock() - before
        if took_s > 2 * _PIECE_S:
            self._piece = max(_LEAST_PIECE, self._piece // 2)
        elif took_s < _PIECE_S / 2:
            self._piece = min(_MOST_PIECE, self._piece * 2)

    def _reading(self) -> Reading:
        """How to read what the runtime does not hold of the text."""
        agreed = self._agree()
        if self._prompts is not None and agreed < len(self._text):
            return self._prompts.cheapest_reading(agreed, len(self._text))
        return Reading(agreed, self._piece)

    def guess_by(self, branches: Sequence[Sequence[int]], propose: Propose) -> list[list[Guess]]:
        """As `guess`, with guesses that `propose` makes."""
        found: list[list[Guess]] = [[] for _ in branches]
        with self._lock:
            for index in self._able(branches):
                branch, length = branches[index], len(self._text)
                row = self._changed(self._run(branch)[: self._num_ids], branch)
                if row is not None:
                    found[index] = propose(row, self._params, length + len(branch))
        return found

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The best scores after each branch, with their gaps.

        None of them at the model's longest sequence, and after a token that its embedding does not have: a target that
        is padded further than the draft may pick an id of its padding.
        """
        found: list[list[Guess]] = [[] for _ in branches]
        with self._lock:
            able = self._with_forced(branches, self._able(branches), found)
            if self._branching is not None and width > 1 and able:
                able = self._run_together(self._branching, branches, able, found, width)
            for index in able:
                found[index] = self._best(self._run(branches[index]), branches[index], width)
        return found

    def _able(self, branches: Sequence[Sequence[int]]) -> list[int]:
        """Which branches can run."""
        if max(self._text[self._agree() :], default=0) >= self._runtime.limits.vocab_size:
            return []
        return [index for index, branch in enumerate(branches) if self._can_run(branch)]

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """Itself, where the runtime runs branches of several sequences in one call."""
        return self if isinstance(self._runtime, JoiningRuntime) else None

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The model's own."""
        return found

    def _catch_up(self) -> list[int]:
        """Runs all but the last few tokens of the text; returns those, at least one, to be run before any branch."""
        kept = self._reading().kept
        missing = self._text[kept:]
        if not missing:  # the logits after the last token are gone
            kept -= 1
            missing = [self._held[kept]]
        self._cut(kept)
        if len(missing) > _MAX_BEHIND:
            done, missing = missing[:-1], missing[-1:]
            self._runtime.extend(done)
            self._held += done
        return missing

    def continuation(self, max_tokens: int) -> list[Guess]:
        """What the grammar forces; every other token of a model costs a call."""
        return [forced_guess(token) for token in self._forced(())[:max_tokens]]

    def allows(self, branch: Sequence[int], token: int) -> bool:
        """Whether the grammar allows a token after a branch; True without one."""
        grammar = self._grammar()
        try:
            return grammar is None or grammar.state.validate([*branch, token]) > len(branch)
        except RequestError:
            self._states = []  # beyond its limits, as in `_follow`
            return True

    def _grammar(self) -> GrammarRows | None:
        """The grammar's state after the text; None without one."""
        if not self._follow():
            return None
        return next((state for state in self._states if isinstance(state, GrammarRows)), None)

    def _forced(self, branch: Sequence[int]) -> list[int]:
        """The tokens that the grammar leaves no choice for after a branch."""
        grammar = self._grammar()
        try:
            if grammar is None or grammar.state.validate(branch) < len(branch):
                return []
            state = grammar.state.fork() if branch else grammar.state
            return state.forced() if all(map(state.advance, branch)) else []
        except RequestError:
            self._states = []
            return []

    def _with_forced(
        self, branches: Sequence[Sequence[int]], able: Sequence[int], found: list[list[Guess]]
    ) -> list[int]:
        """Puts forced tokens into `found`; returns the branches that the model has to run."""
        if not self._states:
            return list(able)
        left = []
        for index in able:
            if forced := self._forced(branches[index]):
                found[index] = [forced_guess(forced[0])]
            else:
                left.append(index)
        return left

    def _can_run(self, branch: Sequence[int]) -> bool:
        limits = self._runtime.limits
        is_known = max(branch, default=0) < limits.vocab_size
        return is_known and len(self._text) + len(branch) < limits.max_positions

    def _best(self, logits: Logits, branch: Sequence[int], width: int) -> list[Guess]:
        position = len(self._text) + len(branch)
        row = self._changed(logits[: self._num_ids], branch)
        if row is None:
            return []
        return model_guesses(candidates(row, self._params, position, width, self._narrowing), width)

    def _follow(self) -> bool:
        """Gives the states the tokens committed since; False where there are none.

        A target that leaves the grammar, or a grammar beyond its limits: the draft goes on without any state.
        """
        try:
            for state in self._states:
                for token in self._text[self._num_ruled :]:
                    state.advance(token)
        except RequestError:
            self._states = []
        self._num_ruled = len(self._text)
        return bool(self._states)

    def _changed(self, row: Logits, branch: Sequence[int]) -> Logits | None:
        """The row as the target's would be changed. The states go along the branch, and back: no fork is kept.

        None where no token may follow the branch: it is outside the grammar, so the target rejects it.
        """
        if not self._follow():
            return row
        lengths = [state.length for state in self._states]
        try:
            for state in self._states:
                for token in branch:
                    state.advance(token)
            return apply_all(self._states, row)
        except RequestError:
            return None
        finally:
            for state, length in zip(self._states, lengths, strict=True):
                state.truncate(length)

    def _agree(self) -> int:
        """How many first tokens the runtime and the text share."""
        agreed, most = self._num_agreed, min(len(self._held), len(self._text))
        while agreed < most and self._held[agreed] == self._text[agreed]:
            agreed += 1
        self._num_agreed = agreed
        return agreed

    def _run(self, branch: Sequence[int]) -> Logits:
        """Logits after a branch: cuts the runtime's sequence back to where it agrees, and extends it."""
        text, held, kept = self._text, self._held, self._reading().kept
        if kept < len(text):
            new = [*text[kept:], *branch]
        else:
            shared = 0
            for mine, its in zip(branch, held[kept:], strict=False):
                if mine != its:
                    break
                shared += 1
            kept += shared
            new = list(branch[shared:])
        if not new:  # the logits after the last token are gone; run that token again
            kept -= 1
            new = [held[kept]]
        self._cut(kept)
        logits = self._runtime.extend(new)
        held += new
        return logits

    def _run_together(
        self,
        runtime: BranchingRuntime,
        branches: Sequence[Sequence[int]],
        indices: Sequence[int],
        found: list[list[Guess]],
        width: int,
    ) -> list[int]:
        """Runs branches as such; the runtime's sequence stays a beginning of the text. Returns those that are left."""
        kept = self._reading().kept
        self._cut(kept)
        missing = self._text[kept:]
        ends = [index for index in indices if not branches[index]]
        if missing and (ends or len(missing) > _MAX_BEHIND):
            logits = self._runtime.extend(missing)
            self._held += missing
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

    def _cut(self, length: int) -> None:
        if length < len(self._held):
            self._runtime.truncate(length)
            del self._held[length:]
            self._num_agreed = min(self._num_agreed, length)

    def forget(self) -> None:
        """Forgets the text, and what the runtime holds of it."""
        with self._lock:
            self._text = []
            self._held = []
            self._states = []
            self._num_agreed = self._num_ruled = 0
            self._runtime.truncate(0)

    def close(self) -> None:
        """Releases the runtime, after the call in progress."""
        with self._lock:
            self._runtime.close()


def guess_together(
    asked: Sequence[tuple[JoiningDrafter, Sequence[Sequence[int]]]], width: int
) -> list[list[list[Guess]]]:
    """What each drafter's `guess` would give for its branches, in one call of the model that all of them share.

    At most `max_branches` branches in all; only for drafters that have a `model_drafter`.
    """
    drafters = [drafter.model_drafter for drafter, _ in asked]
    found: list[list[list[Guess]]] = [[[] for _ in branches] for _, branches in asked]
    groups: list[tuple[SequenceRuntime, list[list[int]]]] = []
    places: list[tuple[int, int]] = []  # of the rows: whose, and which branch
    with ExitStack() as stack:
        for index, (drafter, (_, branches)) in enumerate(zip(drafters, asked, strict=True)):
            assert drafter is not None, "this drafter guesses alone"
            stack.enter_context(drafter._lock)
            if able := drafter._with_forced(branches, drafter._able(branches), found[index]):
                missing = drafter._catch_up()
                groups.append((drafter._runtime, [[*missing, *branches[place]] for place in able]))
                places += [(index, place) for place in able]
        if groups:
            runtime = groups[0][0]
            assert isinstance(runtime, JoiningRuntime)
            for (index, place), row in zip(places, runtime.extend_branches_of(groups), strict=True):
                drafter = drafters[index]
                assert drafter is not None
                found[index][place] = drafter._best(row, asked[index][1][place], width)
    return [drafter.complete(own, branches, width) for own, (drafter, branches) in zip(found, asked, strict=True)]


class NgramDrafter:
    """Drafts by prompt lookup, without a model: repeats what followed the same few tokens before.

    It also copies what follows them in `quoted`, texts that the answer may quote: whichever shares more tokens.
    """

    max_branches = 1
    is_behind = False

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

    def read_on(self) -> None:
        """Nothing to read."""

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

    def close(self) -> None:
        """Nothing to release."""


class MixedDrafter:
    """Drafts with a model and by prompt lookup into one tree: a repetitive text is guessed by both.

    quoted: texts that lookup copies from too.
    """

    def __init__(self, model: Drafter, quoted: Sequence[QuotedText] = ()) -> None:
        self._model = model
        self._allows = model.allows if isinstance(model, ModelDrafter) else None
        self._lookup = NgramDrafter(quoted)

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text in both."""
        self._model.begin(prompt, params, plan)
        self._lookup.begin(prompt, params)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self._model.length

    @property
    def max_branches(self) -> int:
        """The model's."""
        return self._model.max_branches

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens in both."""
        self._model.extend(tokens)
        self._lookup.extend(tokens)

    @property
    def is_behind(self) -> bool:
        """The model's."""
        return self._model.is_behind

    def read_on(self) -> None:
        """The model reads a piece."""
        self._model.read_on()

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The model's guesses, and lookup's beside them; one that both make counts as the model's, and as surer."""
        return self.complete(self._model.guess(branches, width), branches, width)

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """The model's."""
        return self._model.model_drafter if isinstance(self._model, JoiningDrafter) else None

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The model's guesses, and lookup's beside them."""
        for branch, guesses, more in zip(branches, found, self._lookup.guess(branches, width), strict=True):
            for looked_up in more:
                ranks = [index for index, guess in enumerate(guesses) if guess.token == looked_up.token]
                if ranks:
                    guesses[ranks[0]] = shared_guess(guesses[ranks[0]])
                # Beyond the model's longest sequence lookup would go on alone, token by token.
                elif guesses and (self._allows is None or self._allows(branch, looked_up.token)):
                    guesses.append(looked_up)
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """What the grammar forces, else lookup's."""
        return self._model.continuation(max_tokens) or self._lookup.continuation(max_tokens)

    def close(self) -> None:
        """Releases the model."""
        self._model.close()
