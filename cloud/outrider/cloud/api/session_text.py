"""Ends a session where its text has a stop string: cuts its commits, and says where the text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cloud.seam import CommitEvent
from outrider.models.http.answer_text import TextStyle
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import TextCut


class SessionText:
    """The text of one session, as its commits make it. Knows no engine: the caller ends the sequence.

    generated: the last tokens of `prompt` that belong to the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        stop_ids: frozenset[int],
        prompt: Sequence[int],
        generated: int,
    ) -> None:
        begin = len(prompt) - generated
        self._assembler = TextStyle(tuple(stop_strings), stop_ids).assembler(tokenizer, prompt[:begin])
        self._assembler.follow(prompt[begin:])

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._assembler.is_stopped

    @property
    def cut(self) -> TextCut | None:
        """Where a stop string ends the text; None where none does."""
        text = self._assembler
        return None if text.stop is None else TextCut(stop=text.stop, tokens=text.num_tokens, chars=text.num_chars)

    def take(self, event: CommitEvent) -> CommitEvent | None:
        """The commit up to the token that completes a stop string; None after that token."""
        text = self._assembler
        if text.is_stopped:
            return None
        before = text.num_tokens
        text.push(event.tokens)
        if not text.is_stopped:
            return event
        left = text.num_tokens - before
        accepted = min(event.accepted, left)
        return replace(event, tokens=event.tokens[:left], logprobs=event.logprobs[:left], accepted=accepted)

    def finish(self) -> None:
        """Looks at what was held back: half a character may complete a stop string. Call it after the last commit."""
        self._assembler.finish()
