"""Loads schemas such as people publish, with prompts for them; written for these benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

SCHEMAS: Final = Path(__file__).parent / "data" / "schemas.jsonl"


def load_schemas(limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` schemas, each with a title; None: all."""
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def prompt_of(schema: dict[str, Any]) -> str:
    """A prompt in the reference pair's own language, Python."""
    return f'import json\n\n# {schema["title"]}\nRECORD = json.loads("""'
