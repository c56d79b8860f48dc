"""The prompts on which an export measures the acceptance rate.

The built-in ones were written for this purpose, so no model was trained on them: beginnings of Python functions and of
prose. The reference pair brings its own, cut from files that its training never saw.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from outrider.models.errors import ExportError

MAX_PROMPTS: Final = 16
"""As many are taken of a model's own; a user's are all taken."""

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


def load_prompts(path: Path, limit: int | None = None) -> tuple[str, ...]:
    """The prompts of a JSON file, a list of texts or of objects with a `text`; the first `limit` of them, or all.

    Raises ExportError if the file is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read as JSON ({error}); expected a list of prompts") from None
    entries = found if isinstance(found, list) else []
    texts = [entry.get("text") if isinstance(entry, dict) else entry for entry in entries[:limit]]
    prompts = tuple(text for text in texts if isinstance(text, str) and text)
    if not prompts or len(prompts) != len(texts):
        raise ExportError(f'{path} holds no list of texts; expected JSON such as ["def f(x):", "Once upon a time"]')
    return prompts
