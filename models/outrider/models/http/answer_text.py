"""Turns tokens into the text of an answer, cut at stop strings.

The text does not depend on how commits were chunked: tokens are taken one by one, and those after the one that
completes a stop string do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.text.detokenizer import StreamingDetokenizer
from outrider.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token of the text. offset: characters of the text before it. logprobs: None where none were asked for."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None

    @property
    def known(self) -> TokenLogprobs:
        """The logprobs, where they were asked for."""
        assert self.logprobs is not None
        return self.logprobs


@dataclass(frozen=True, slots=True)
class TextStyle:
    """How the texts of one call are cut and shown. stop_strings, stop_ids: end a text.

    includes_stop: what ends the text, a stop string or the text of a stop id, is part of it. skips_special: special
    tokens leave no text, but those in `shown`. keeps_pieces: `take_pieces` is called. Of text that was cut in a token,
    the token is part of the text.
    """

    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    includes_stop: bool = False
    skips_special: bool = True
    shown: frozenset[int] = frozenset()
    keeps_pieces: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether its stop strings are found in the text that a session's server sees."""
        return self.skips_special and not self.shown

    def assembler(self, tokenizer: Tokenizer, context: Sequence[int]) -> TextAssembler:
        """For one text. context: the prompt."""
        detokenizer = tokenizer.detokenizer(context=context, skip_special_tokens=self.skips_special, shown=self.shown)
        return TextAssembler(detokenizer, self)


class TextAssembler:
    """Tokens in, text out; holds back text that may begin a stop string."""

    def __init__(self, detokenizer: StreamingDetokenizer, style: TextStyle) -> None:
        self._detokenizer = detokenizer
        self._stops = [_StopString(stop) for stop in style.stop_strings]
        self._style = style
        self._held = ""
        self._waiting: deque[TokenPiece] | None = deque() if style.keeps_pieces else None
        self._settled: list[TokenPiece] = []
        self._sum_logprobs = 0.0
        self.num_tokens = 0
        self.num_chars = 0
        """Characters shown."""
        self.is_stopped = False
        self.stop: str | None = None
        """The stop string that ended the text."""

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that count, where their logprobs are known; 0 without tokens."""
        return self._sum_logprobs / max(1, self.num_tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the text that were counted before: a stop string may have begun or ended in them."""
        for token in tokens:
            if not self.is_stopped and (token not in self._style.stop_ids or self._style.includes_stop):
                self._release(self._detokenizer.push(token))

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """The text that `tokens` add. A stop string is not part of it, and nothing follows it.

        logprobs: of each token, or none at all.
        """
        shown = ""
        for index, token in enumerate(tokens):
            if self.is_stopped:
                break
            self.num_tokens += 1
            known = logprobs[index] if logprobs else None
            if known is not None:
                self._sum_logprobs += known.logprob
            if token in self._style.stop_ids and not self._style.includes_stop:
                continue
            if self._waiting is not None:
                self._waiting.append(TokenPiece(token, self.num_chars + len(self._held), known))
            shown += self._release(self._detokenizer.push(token))
            self._settle()
        return shown

    def finish(self) -> str:
        """The text held back; call it after the last token."""
        if self.is_stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        if not self.is_stopped:
            self.num_chars += len(self._held)
            shown += self._held
            self._held = ""
        self._settle()
        return shown

    def take_pieces(self) -> list[TokenPiece]:
        """The tokens of the text that was shown since the last call, those without text among them."""
        taken, self._settled = self._settled, []
        return taken

    def _settle(self) -> None:
        """Counts tokens to the text that is shown; call it after each, or they would depend on how they came."""
        while self._waiting and (
            self._waiting[0].offset < self.num_chars
            or not (self._held or self.is_stopped or self._detokenizer.is_inside)
        ):
            self._settled.append(self._waiting.popleft())

    def _release(self, piece: str) -> str:
        text = self._held + piece
        ends = [(at, stop.text) for stop in self._stops if (at := stop.push(piece)) is not None]
        if ends:
            # What is held is the beginning of some stop string, so each of them ends in this piece.
            after, self.stop = min(ends, key=lambda end: end[0] - len(end[1]))
            end = len(self._held) + after
            self.is_stopped = True
            self._held = ""
            shown = text[:end] if self._style.includes_stop else text[: end - len(self.stop)]
        else:
            keep = max((stop.num_matched for stop in self._stops), default=0)
            shown = text[: len(text) - keep]
            self._held = text[len(text) - keep :]
        self.num_chars += len(shown)
        return shown


class _StopString:
    """A stop string, and how much of it the text ends with: constant work per character (Knuth, Morris, Pratt 1977).

    num_matched: length of the longest end of the text that is a beginning of it.
    """

    __slots__ = ("_shorter", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # Of each beginning, by its length less 1: the longest shorter beginning that it ends with. Filled as needed.
        self._shorter = [0]

    def push(self, piece: str) -> int | None:
        """Goes on by `piece`; how much of it ends the first occurrence, or None."""
        text, matched = self.text, self.num_matched
        for index, char in enumerate(piece):
            while matched and text[matched] != char:
                matched = self._shorter_of(matched)
            matched += text[matched] == char
            if matched == len(text):
                return index + 1
        self.num_matched = matched
        return None

    def _shorter_of(self, length: int) -> int:
        text, shorter = self.text, self._shorter
        while len(shorter) < length:
            at = shorter[-1]
            while at and text[at] != text[len(shorter)]:
                at = shorter[at - 1]
            shorter.append(at + (text[at] == text[len(shorter)]))
        return shorter[length - 1]
