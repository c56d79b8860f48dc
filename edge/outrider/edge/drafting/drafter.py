"""Guesses the next token on the device: drafters with one interface.

A drafter holds one text and guesses what follows it, or any continuation of it. One worker thread at a time drives it,
and it knows no network. Its guesses are hints: whatever it proposes, the text is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.edge.drafting.calibration import Guess, lookup_guess, model_guesses, shared_guess
from outrider.models.runtimes.base import BranchingRuntime, SequenceRuntime
from outrider.models.runtimes.ngram import NgramLookup
from outrider.models.sampling import SamplingParams, candidates

Logits = NDArray[np.float32]
_MAX_BEHIND = 32
"""Tokens by which a branching runtime's sequence may be behind the text. Committed tokens have run as branches already;
to take them over, the last of them runs again.
"""


class Drafter(Protocol):
    """One text, and guesses of what follows its continuations."""

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new text; forgets the one before."""
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


class ModelDrafter:
    """Drafts with a model: its best scores, with the same noise as the target's pick at the same position.

    The runtime holds one sequence: for a branch it is cut back to the fork and extended. A `BranchingRuntime` runs
    several branches in one call. Tokens are fed to the runtime only when a guess needs them.
    """

    def __init__(self, runtime: SequenceRuntime, num_ids: int | None = None) -> None:
        """num_ids: ids that the tokenizer knows; logits beyond are padding, which the target may not have, and are
        never proposed. None: all.
        """
        self._runtime = runtime
        self._branching = runtime if isinstance(runtime, BranchingRuntime) else None
        self._num_ids = num_ids
        self._text: list[int] = []
        self._held: list[int] = []  # what the runtime holds: a beginning of the text, perhaps with a branch after it
        self._num_agreed = 0  # first tokens of `_held` that are known to be the text's
        self._params = SamplingParams()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new text; keeps the cache of the beginning that both share."""
        self._text = list(prompt)
        self._num_agreed = 0
        self._params = params

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

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The best scores after each branch, with their gaps.

        None of them at the model's longest sequence, and after a token that its embedding does not have: a target that
        is padded further than the draft may pick an id of its padding.
        """
        found: list[list[Guess]] = [[] for _ in branches]
        if max(self._text[self._agree() :], default=0) >= self._runtime.limits.vocab_size:
            return found
        able = [index for index, branch in enumerate(branches) if self._can_run(branch)]
        if self._branching is not None and width > 1 and able:
            able = self._run_together(self._branching, branches, able, found, width)
        for index in able:
            found[index] = self._best(self._run(branches[index]), len(branches[index]), width)
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """None: every token of a model costs a call."""
        return []

    def _can_run(self, branch: Sequence[int]) -> bool:
        limits = self._runtime.limits
        is_known = max(branch, default=0) < limits.vocab_size
        return is_known and len(self._text) + len(branch) < limits.max_positions

    def _best(self, logits: Logits, num_after: int, width: int) -> list[Guess]:
        position = len(self._text) + num_after
        return model_guesses(candidates(logits[: self._num_ids], self._params, position, width), width)

    def _agree(self) -> int:
        """How many first tokens the runtime and the text share."""
        agreed, most = self._num_agreed, min(len(self._held), len(self._text))
        while agreed < most and self._held[agreed] == self._text[agreed]:
            agreed += 1
        self._num_agreed = agreed
        return agreed

    def _run(self, branch: Sequence[int]) -> Logits:
        """Logits after a branch: cuts the runtime's sequence back to where it agrees, and extends it."""
        text, held, kept = self._text, self._held, self._agree()
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
        agreed = self._agree()
        self._cut(agreed)
        missing = self._text[agreed:]
        ends = [index for index in indices if not branches[index]]
        if missing and (ends or len(missing) > _MAX_BEHIND):
            logits = self._runtime.extend(missing)
            self._held += missing
            for index in ends:
                found[index] = self._best(logits, 0, width)
            missing, ends = [], []
        others = [index for index in indices if branches[index]]
        for start in range(0, len(others), runtime.max_branches):
            part = others[start : start + runtime.max_branches]
            rows = runtime.extend_branches([[*missing, *branches[index]] for index in part])
            for index, row in zip(part, rows, strict=True):
                found[index] = self._best(row, len(branches[index]), width)
        return ends

    def _cut(self, length: int) -> None:
        if length < len(self._held):
            self._runtime.truncate(length)
            del self._held[length:]
            self._num_agreed = min(self._num_agreed, length)

    def close(self) -> None:
        """Releases the runtime."""
        self._runtime.close()


class NgramDrafter:
    """Drafts by prompt lookup, without a model: repeats what followed the same few tokens before."""

    max_branches = 1

    def __init__(self) -> None:
        self._lookup = NgramLookup()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new text; ignores the sampling parameters."""
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
            suffix, tokens = self._lookup.match(1)
            self._lookup.truncate(length)
            found.append([lookup_guess(tokens[0], suffix)] if tokens else [])
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """What followed the longest repeated suffix of the text."""
        suffix, tokens = self._lookup.match(max_tokens)
        return [lookup_guess(token, suffix + index) for index, token in enumerate(tokens)]

    def close(self) -> None:
        """Nothing to release."""


class MixedDrafter:
    """Drafts with a model and by prompt lookup into one tree: a repetitive text is guessed by both."""

    def __init__(self, model: Drafter) -> None:
        self._model = model
        self._lookup = NgramDrafter()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new text in both."""
        self._model.begin(prompt, params)
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

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The model's guesses, and lookup's beside them; one that both make counts as the model's, and as surer."""
        found = self._model.guess(branches, width)
        for guesses, more in zip(found, self._lookup.guess(branches, width), strict=True):
            for looked_up in more:
                ranks = [index for index, guess in enumerate(guesses) if guess.token == looked_up.token]
                if ranks:
                    guesses[ranks[0]] = shared_guess(guesses[ranks[0]])
                elif guesses:  # beyond the model's longest sequence lookup would go on alone, token by token
                    guesses.append(looked_up)
        return found

    def continuation(self, max_tokens: int) -> list[Guess]:
        """Lookup's."""
        return self._lookup.continuation(max_tokens)

    def close(self) -> None:
        """Releases the model."""
        self._model.close()
