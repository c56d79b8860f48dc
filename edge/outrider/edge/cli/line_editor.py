"""Reads messages: with an editor on a terminal, line by line from a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from outrider.models.errors import ConfigError
from outrider.models.process.command_line import require_utf8

PROMPT: Final = "> "
CONTINUED: Final = "  "
CONTINUES: Final = "\\"
"""At the end of a line: the message goes on in the next."""


class Reader(Protocol):
    """Where messages come from. is_typed: somebody sits there, and sees what is asked and noted."""

    is_typed: bool

    async def read(self) -> str | None:
        """The next message; None at the end. Raises KeyboardInterrupt on Ctrl-C, ConfigError for bytes of no text."""


class PipeReader:
    """Reads a line for a message from a file or a pipe; a line that ends in a backslash goes on in the next."""

    is_typed = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdin
        if isinstance(self._stream, io.TextIOWrapper):  # else Windows reads it in the system's code page
            self._stream.reconfigure(encoding="utf-8", errors="surrogateescape")

    async def read(self) -> str | None:
        """The next message. Blocks the event loop: nothing else runs between two answers."""
        lines: list[str] = []
        while line := self._stream.readline():
            lines.append(line.rstrip("\r\n"))
            if not lines[-1].endswith(CONTINUES):
                break
            lines[-1] = lines[-1].removesuffix(CONTINUES)
        return require_utf8("\n".join(lines), "a message") if lines else None


class TerminalReader:
    """Reads with an editor: Enter sends, Alt-Enter or a backslash before Enter begins a new line, arrows go back.

    history: file that keeps what was typed; None keeps it for this chat only. Raises ConfigError for one that cannot be
    written; where it can no more, `on_note` gets a sentence, once. commands: completed after a slash.
    more: options of prompt_toolkit's session, such as a test's input and output.
    """

    is_typed = True

    def __init__(
        self,
        history: Path | None,
        commands: Sequence[str],
        on_note: Callable[[str], None] = lambda words: None,
        **more: Any,
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import InMemoryHistory

        self._on_note = on_note
        self._untold: list[str] = []
        if history is not None:
            try:  # before the session opens it: only its owner can read it
                os.close(os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
            except OSError as error:
                raise ConfigError(
                    f"--history {history} cannot be written: {error.strerror}; name another file"
                ) from None
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            history=_kept_in(history, self._untold.append) if history is not None else InMemoryHistory(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            prompt_continuation=CONTINUED,
            key_bindings=_keys(),
            enable_open_in_editor=False,
            **more,
        )

    async def read(self) -> str | None:
        """The next message."""
        try:
            return require_utf8(await self._session.prompt_async(PROMPT), "the message")
        except EOFError:
            return None
        finally:
            while self._untold:
                self._on_note(self._untold.pop())


def _kept_in(path: Path, on_full: Callable[[str], None]) -> Any:
    """The history in a file; from a write that fails, as on a full disk, in memory."""
    from prompt_toolkit.history import FileHistory

    class History(FileHistory):
        is_full = False

        def store_string(self, string: str) -> None:
            if self.is_full:
                return
            try:
                super().store_string(string)
            except OSError as error:  # the editor would show its traceback at each message
                self.is_full = True
                on_full(f"--history {path} takes no more ({error.strerror}): the rest ends with this chat.")

    return History(str(path))


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUES):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
