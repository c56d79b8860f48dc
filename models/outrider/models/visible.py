"""Makes control characters visible, so that text from elsewhere cannot command a terminal.

A terminal obeys escape sequences: they set its title, fill the clipboard, move the cursor over what stands there, or
have an answer typed at the shell. Bidirectional controls show text in another order than it has.
"""

from __future__ import annotations

from typing import Final

_KEPT: Final = "\n\t"
_C0_C1: Final = (*range(0x20), *range(0x7F, 0xA0))
# Marks, embeddings, overrides and isolates (UAX 9), and the separators that some terminals take as line ends.
_INVISIBLE: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN: Final = {
    code: f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"
    for code in (*_C0_C1, *_INVISIBLE)
    if chr(code) not in _KEPT
}


def visible(text: str) -> str:
    r"""The text with an escape such as `\x1b` for each control character but newline and tab.

    A JSON document that escapes everything below U+0020 stays that document.
    """
    return text.translate(_SHOWN)
