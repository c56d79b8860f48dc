"""Reads and tokenizes a user's prompts, and holds the built-in ones for measuring acceptance without any.

The built-in ones were written for this purpose, so no model was trained on them: beginnings of Python functions and of
prose. The reference pair brings its own, cut from files that its training never saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import ExportError
from outrider.models.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

MAX_PROMPTS: Final = 16
"""How many of a model's own prompts are used; a user's are all used."""

CHAT_DATE: Final = datetime(2026, 1, 1, 12)
"""The date that chat templates print: with today's, the same prompts would be others tomorrow."""

_FORMATS: Final = (
    'expected a JSON list such as ["def f(x):", {"text": "Once upon"}], JSONL with a "text", "prompt" or "messages" '
    "per line, or plain text with one prompt per line"
)

BUILT_IN_PROMPTS: Final = (
    'def parse_duration(text):\n    """Return the number of seconds in a string such as "1h30m"."""\n    total = 0\n',
    "class TokenBucket:\n    def __init__(self, rate, capacity):\n        self.rate = rate\n        self.capacity = ",
    "def merge_intervals(intervals):\n    result = []\n    for start, end in sorted(intervals):\n        if result and "
    "",
    "def read_config(path):\n    config = {}\n    with open(path) as f:\n        for line in f:\n            line = "
    "line.",
    "The harbour was quiet that morning. Two fishing boats lay at the pier, and",
    "To make a simple bread you need flour, water, salt and yeast. First,",
    "Question: Why does a metal spoon feel colder than a wooden one?\nAnswer:",
    "Minutes of the meeting of 12 March\n\n1. The chair opened the meeting at",
    "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\nJOIN orders ON",
    "Dear Ms Okafor,\n\nThank you for your letter of 3 May. We are sorry to hear that",
    "# Installing the pump\n\n1. Turn off the water.\n2. Remove the old pump by",
    "The three main reasons why cities grow along rivers are",
    "User: My laptop gets hot when I charge it. Should I worry?\nAssistant:",
    "function debounce(callback, delay) {\n  let timer = null;\n  return function (...args) {\n",
    "When the train finally came, she had already decided that",
)


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
        # Not `splitlines`: it also cuts at characters that JSON allows inside strings.
        lines = [(f"line {number}", line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
        lines = [(where, line) for where, line in lines if line.strip()]
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

    def encoded(prompt: Any) -> list[int]:
        if isinstance(prompt, str) and not is_chat:
            return tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(messages, variables={"strftime_now": CHAT_DATE.strftime})
        return tokenizer.encode(text, add_special_tokens=False)

    return [tuple(encoded(prompt)) for prompt in prompts]


def _parse(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
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
