"""Keeps answers that the draft wrote alone, and has a cloud check them once one answers.

A text that has been sent cannot be taken back, so a client asks for the check: `POST /v1/outrider/verify` with the
answer's id. The target generates from the last token that it had written; the answer says how far both agree, and has
the target's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from outrider.edge.link.origin import Served
from outrider.edge.results import GenerationRequest
from outrider.models.errors import RequestError
from outrider.models.http.answer_text import TextStyle
from outrider.models.process.by_owner import Bounds, OwnerStore
from outrider.models.runtimes.base import num_shared
from outrider.models.wire.fields import StrictMessage

MAX_KEPT: Final = 64
"""Answers; the oldest of the client that has most give way."""
MAX_KEPT_TOKENS: Final = 1 << 20
"""Of all of them, prompts included."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """One choice of an answer. request: as it was. verified, local: its tokens. began: whose the verified ones are.

    style: how its text is cut and shown. model: that the request names; the same for all choices of an answer.
    no_store: as in ClientOptions.
    """

    request: GenerationRequest
    verified: tuple[int, ...]
    local: tuple[int, ...]
    began: Served | None
    style: TextStyle
    model: str | None = None
    no_store: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return len(self.request.prompt) + len(self.verified) + len(self.local)

    def rest(self, target: str | None) -> tuple[KeptText, GenerationRequest | None]:
        """The text as this target must check it, and what to ask it for; None where nothing is left.

        The tokens of another target prove nothing about this one's, so they are checked too.
        """
        kept = self
        if self.began is None or self.began.target != target:
            kept = replace(self, verified=(), local=(*self.verified, *self.local))
        has_rest = len(kept.verified) < self.request.max_tokens
        return kept, self.request.after(kept.verified) if has_rest else None


KeptAnswer = dict[int, KeptText]
"""The unverified choices of an answer, by index."""


class UnverifiedAnswers:
    """The latest answers that hold unverified text, by id; bounded in number and tokens. Lives on one event loop."""

    def __init__(self) -> None:
        self._kept = OwnerStore[bytes, str, KeptAnswer](Bounds(max_all=MAX_KEPT, max_size=MAX_KEPT_TOKENS))
        self._in_work: set[str] = set()

    def keep(self, answer: str, owner: bytes, index: int, text: KeptText) -> None:
        """Keeps a choice of an answer."""
        kept = {**(self._kept.get(owner, answer) or {}), index: text}
        self._kept.put(owner, answer, kept, sum(each.num_tokens for each in kept.values()))

    def find(self, answer: str, owner: bytes) -> KeptAnswer:
        """The answer with this id. Raises RequestError 404, also for one of another client."""
        kept = self._kept.get(owner, answer)
        if kept is None:
            raise RequestError(
                "unknown_answer",
                f"no unverified answer has the id {answer!r}; it was verified, or is too old",
                status=404,
            )
        return kept

    @contextmanager
    def checking(self, answer: str, owner: bytes) -> Iterator[KeptAnswer]:
        """The answer, to be verified inside; forgotten after that, and kept where it fails.

        Raises RequestError 404 as `find`, 409 while another call has it verified.
        """
        kept = self.find(answer, owner)
        if answer in self._in_work:
            raise RequestError(
                "answer_in_work", f"another call has the answer {answer!r} verified; wait for that one", status=409
            )
        self._in_work.add(answer)
        try:
            yield kept
        finally:
            self._in_work.remove(answer)
        self._kept.pop(owner, answer)


class VerifyAnswerRequest(StrictMessage):
    """POST /v1/outrider/verify. id: of an answer with unverified text."""

    id: Annotated[str, Field(min_length=1, max_length=128)]


class VerifiedChoice(BaseModel):
    """One choice. text: the target's. confirmed_tokens: of the unverified ones, how many are the target's too.

    replaced_tokens: the others. is_same: whether the text that was sent is the target's.
    """

    index: int
    text: str
    finish_reason: str
    is_same: bool
    confirmed_tokens: int
    replaced_tokens: int


class VerifiedAnswer(BaseModel):
    """The answer of /v1/outrider/verify."""

    id: str
    object: Literal["outrider.verification"] = "outrider.verification"
    model: str
    choices: list[VerifiedChoice]


def compared(kept: KeptText, new: Sequence[int]) -> tuple[int, int]:
    """Local tokens that are the target's too, up to the first that is not; and the others."""
    same = num_shared(kept.local, new)
    return same, len(kept.local) - same
