"""Computes the identity of a tokenizer: what decides which text becomes which ids, and back.

The fingerprint is a SHA-256 over the vocabulary, the merges, the added tokens and the configuration of normalizer,
pre-tokenizer, post-processor and decoder, in a canonical form: key order, formatting, the two spellings of merges, and
keys that newer releases write with an empty value make no difference. Embedding padding, chat templates and the choice
of an end token belong to the model, not to the tokenizer, and do not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import TokenizerError

COMPONENTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_ABSENT: Final = "nothing"
# By type, a switch that is on in files without it.
_ON_WHERE_ABSENT: Final = {"ByteLevel": "use_regex", "Metaspace": "split"}


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """A tokenizer's identity in canonical form: sections, each an ordered list of entries."""

    vocabulary: list[str]
    merges: list[str]
    added: list[str]
    settings: list[str]

    @classmethod
    def read(cls, tokenizer_json: Path) -> TokenizerIdentity:
        """Raises TokenizerError if the `tokenizers` library did not write the file."""
        try:
            raw = json.loads(tokenizer_json.read_text(encoding="utf-8"))
            model = raw["model"]
            return cls(
                vocabulary=_vocabulary(model.get("vocab", {})),
                merges=[
                    _dump(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in _list(model, "merges")
                ],
                added=[_dump(_canonical(token)) for token in sorted(_list(raw, "added_tokens"), key=lambda t: t["id"])],
                settings=_settings(raw, model),
            )
        except OSError as error:
            raise TokenizerError(f"{tokenizer_json} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TokenizerError(
                f"{tokenizer_json} is not a file of the `tokenizers` library ({type(error).__name__}: "
                f"{error}); save the tokenizer again with transformers' save_pretrained"
            ) from None

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits."""
        digest = hashlib.sha256(b"outrider tokenizer 1\n")
        for title, entries in self._sections():
            digest.update(f"{title} {len(entries)}\n".encode())
            for entry in entries:
                # A lone surrogate in a hand-made file must not end the program.
                digest.update(entry.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def first_difference(self, other: TokenizerIdentity) -> str | None:
        """The first entry in which the two differ, in words ("this one" first), or None."""
        for (title, mine), (_, others) in zip(self._sections(), other._sections(), strict=True):
            for index, (ours, theirs) in enumerate(zip_longest(mine, others, fillvalue=_ABSENT)):
                if ours != theirs:
                    return f"{title} entry {index}: {_short(ours)} against {_short(theirs)}"
        return None

    def _sections(self) -> tuple[tuple[str, list[str]], ...]:
        return (
            ("vocabulary", self.vocabulary),
            ("merges", self.merges),
            ("added tokens", self.added),
            ("settings", self.settings),
        )


def _vocabulary(vocab: dict[str, int] | list[Any]) -> list[str]:
    """Entries in the order of ids. Unigram keeps a list of (token, score), every other model a dictionary."""
    if isinstance(vocab, list):
        return [_dump(entry) for entry in vocab]
    return [f"{index} {_dump(token)}" for token, index in sorted(vocab.items(), key=lambda item: item[1])]


def _settings(raw: dict[str, Any], model: dict[str, Any]) -> list[str]:
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    named = [("model", rest)] + [(name, raw.get(name)) for name in COMPONENTS]
    return [f"{name} {_dump(_canonical(value))}" for name, value in named]


def _canonical(value: Any) -> Any:
    """Without keys whose value is null, false or empty, and without those that change neither ids nor text.

    What false and null, or an absent key, mean different things for is kept apart.
    """
    if isinstance(value, dict):
        kept = {key: _canonical(item) for key, item in value.items() if key != "trim_offsets"}
        kind = kept.get("type")
        if kind in _ON_WHERE_ABSENT:
            kept.setdefault(_ON_WHERE_ABSENT[kind], True)
        if kind == "BertNormalizer" and kept.get("lowercase") and kept.get("strip_accents") is False:
            kept["strip_accents"] = "off"  # null means as `lowercase`
        return {
            key: item
            for key, item in kept.items()
            if item is not None and item is not False and item not in ("", [], {})
        }
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    return raw.get(key) or []


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _short(entry: str) -> str:
    return entry if len(entry) <= 160 else entry[:157] + "..."
