"""The user's prompts: read from whatever file they are in, tokenized, and split so that none is seen twice.

Prompts are told to nobody: what is recorded of them are counts and a hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import ExportError
from outrider.models.tokenizer import Tokenizer

Ids = tuple[int, ...]
LEAST: Final = 4
"""The fewest prompts that any part may have."""

MAX_TEST: Final = 128
MAX_VALIDATION: Final = 64
_FORMATS: Final = (
    'expected a JSON list such as ["def f(x):", {"text": "Once upon"}], JSONL with a "text", "prompt" or "messages" a '
    "line, or plain text with a prompt a line"
)


@dataclass(frozen=True, slots=True)
class Split:
    """Tokenized prompts without duplicates: to train on, to choose the checkpoint by, and to measure with.

    num_cut: prompts of which only the end was kept. num_dropped: duplicates, empty ones, and prompts to train on that
    are held out.
    """

    train: tuple[Ids, ...]
    validation: tuple[Ids, ...]
    test: tuple[Ids, ...]
    num_cut: int
    num_dropped: int

    @property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        parts = [self.train, self.validation, self.test]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: texts, or lists of chat messages. Raises ExportError if the file is something else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read ({error}); {_FORMATS}") from None
    start = text.lstrip()[:1]
    entries: Iterable[tuple[str, Any]]
    if path.suffix == ".json" or (start == "[" and path.suffix not in (".jsonl", ".txt")):
        found = _parse(path, "", text)
        if not isinstance(found, list):
            raise ExportError(f"{path} holds a {type(found).__name__}; {_FORMATS}")
        entries = ((f"entry {number}", entry) for number, entry in enumerate(found, start=1))
    else:
        lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        is_jsonl = path.suffix == ".jsonl" or (start == "{" and path.suffix != ".txt")
        entries = [(where, _parse(path, where, line)) for where, line in lines] if is_jsonl else lines
    prompts = [_prompt(path, where, entry) for where, entry in entries]
    if not prompts:
        raise ExportError(f"{path} holds no prompts; {_FORMATS}")
    return prompts


def encode_prompts(prompts: Sequence[Any], tokenizer: Tokenizer, *, is_chat: bool) -> list[Ids]:
    """Token ids of each prompt. Messages, and with `is_chat` every text, go through the tokenizer's chat template.

    Raises TokenizerError if there is none.
    """
    ids: list[Ids] = []
    for prompt in prompts:
        if isinstance(prompt, str) and not is_chat:
            ids.append(tuple(tokenizer.encode(prompt)))
            continue
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(messages)
        ids.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return ids


def split_prompts(prompts: Sequence[Ids], heldout: float | Sequence[Ids], *, seed: int, max_tokens: int) -> Split:
    """Cuts, removes duplicates and splits; deterministic by `seed`, whatever the order of the prompts.

    heldout: the share to measure with (at least LEAST, at most MAX_TEST prompts), or prompts of their own for it. Half
    as many of the others are for validation. Of prompts longer than `max_tokens` the end is kept, where a chat's last
    turn stands. Raises ExportError if some part would have fewer than LEAST prompts.
    """
    own, num_cut = _unique(prompts, max_tokens)
    order = sorted(own, key=_rank(seed))
    if isinstance(heldout, float):
        size = min(MAX_TEST, max(LEAST, round(heldout * len(order))))
        share, test, rest = heldout, order[:size], order[size:]
        num_given = len(prompts)
    else:
        unique, more = _unique(heldout, max_tokens)
        test = sorted(unique, key=_rank(seed))[:MAX_TEST]
        # Of what is held out nothing is trained on, measured or not.
        rest = [prompt for prompt in order if prompt not in unique]
        share, num_cut, num_given = 0.1, num_cut + more, len(prompts) + len(heldout)
    size = min(MAX_VALIDATION, max(LEAST, round(share / 2 * len(rest))))
    validation, train = rest[:size], rest[size:]
    if len(test) < LEAST or len(train) < LEAST:
        raise ExportError(
            f"of {num_given} prompts, {len(train)} are left to train on, {len(validation)} to choose the checkpoint by "
            f"and {len(test)} to measure with, without duplicates; expected at least {LEAST} each: give more prompts"
        )
    used = len(train) + len(validation) + len(test)
    return Split(tuple(train), tuple(validation), tuple(test), num_cut, num_given - used)


def _parse(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ExportError(f"{path}{', ' + where if where else ''} is not JSON ({error}); {_FORMATS}") from None


def _prompt(path: Path, where: str, entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for key in ("text", "prompt"):
            if isinstance(entry.get(key), str):
                return entry[key]
        messages = entry.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return messages
    raise ExportError(f"{path}, {where} holds no prompt; {_FORMATS}")


def _unique(prompts: Sequence[Ids], max_tokens: int) -> tuple[dict[Ids, None], int]:
    """The ends of the prompts, each once, in their order, and how many were cut."""
    num_cut = sum(len(prompt) > max_tokens for prompt in prompts)
    return dict.fromkeys(prompt[-max_tokens:] for prompt in prompts if prompt), num_cut


def _rank(seed: int) -> Callable[[Ids], bytes]:
    return lambda prompt: hashlib.sha256(f"{seed} {prompt}".encode()).digest()
