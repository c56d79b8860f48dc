"""Turns text into token ids and back, with the `tokenizers` library and the files beside a model.

Knows no model: ids at or beyond `size` are padding of the model's embedding, and decode to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers

from outrider.models.errors import TokenizerError, TokenizerMismatch
from outrider.models.text.chat_template import choose_template, render_template
from outrider.models.text.detokenizer import StreamingDetokenizer, plan_decoding, plan_spelling
from outrider.models.text.fingerprint import TokenizerIdentity
from outrider.models.text.further import Further

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that `Tokenizer.from_dir` reads, besides the model's own `config.json`; only the first is required."""
SHARED_FILES: Final = (*TOKENIZER_FILES, "config.json")
"""All that it reads: what a verifier shares of its target's tokenizer."""
MAX_SHARED_BYTES: Final = 64 << 20
"""Of these files in all. The largest tokenizer.json known has 33 MB."""


class Tokenizer:
    """A loaded tokenizer. Safe to share between threads: nothing changes after loading."""

    def __init__(self, backend: Any, directory: Path, name: str) -> None:
        self.name = name
        self.directory = directory
        self._backend = backend
        self._new_decoder = plan_decoding(backend)
        self._spell = plan_spelling(backend)
        self._config = _read_json(directory / "tokenizer_config.json")
        self._special_names = _special_names(self._config, _read_json(directory / "special_tokens_map.json"))
        self.size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_dir(cls, directory: str | Path, *, name: str | None = None, limit: int | None = None) -> Tokenizer:
        """Reads `tokenizer.json` and its companions. `name` is for messages; by default the directory's name.

        limit: the model's vocab_size; None takes that of config.json, where it names one. Added tokens from there on,
        which a text model has no rows for (Gemma 3's image), are left out: no text becomes them. The fingerprint is
        that of the whole file. Raises TokenizerError if the file is missing or the `tokenizers` library cannot read it.
        """
        root = Path(directory)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{root} has no tokenizer.json; save the model's fast tokenizer there with transformers' "
                "save_pretrained"
            )
        limit = _stated_limit(root) if limit is None else limit
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            if limit is not None and any(index >= limit for index in backend.get_added_tokens_decoder()):
                document = json.loads(backend.to_str())
                document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < limit]
                backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(
                f"{path} is not a file that tokenizers {tokenizers.__version__} can read ({error}); save it again"
            ) from None
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, root, name or root.resolve().name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds those that the tokenizer puts around a prompt.

        Other threads run meanwhile, however long the text is.
        """
        # The library's `encode` holds the interpreter lock: 1 to 2.5 s for 1 MiB of text.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def further(self) -> Further:
        """Splits texts that follow others."""
        return Further(self._backend, self.name)

    @cached_property
    def max_token_chars(self) -> int:
        """The characters of the longest token: a text of n tokens has at most n times as many.

        Not counted is what a normalizer removes, such as runs of spaces, and text that it gives one token for unknowns.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, the same as streaming gives; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(
        self,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> StreamingDetokenizer:
        """A new streaming detokenizer for the text after `context` (the prompt, whose text is not repeated).

        shown: special tokens that leave text all the same.
        """
        hidden = self.special_ids - shown if skip_special_tokens else frozenset[int]()
        return StreamingDetokenizer(self._new_decoder, hidden, context=context)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token's text: half a character for some. Special tokens as they read; padding has none."""
        return self._spell(index)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text for a conversation; encode it with `add_special_tokens=False`.

        Raises TokenizerError if the model has no chat template, or its template refuses the messages.
        """
        source = choose_template(self._chat_template, has_tools=bool(tools))
        if source is None:
            raise TokenizerError(
                f"{self.name} has no chat template, so it cannot take messages; give a plain prompt (to a server: "
                "/v1/completions)"
            )
        return render_template(
            source,
            self._special_names,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template to apply."""
        return choose_template(self._chat_template, has_tools=False) is not None

    def to_json(self) -> str:
        """The content of tokenizer.json, as the `tokenizers` library writes it."""
        text: str = self._backend.to_str()
        return text

    def template_source(self, *, has_tools: bool = False) -> str | None:
        """The chat template's text, or None."""
        return choose_template(self._chat_template, has_tools=has_tools)

    @cached_property
    def begins_with_bos(self) -> bool:
        """Whether `encode` puts the beginning token before a text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own spelling, or None."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def token(self, index: int) -> str | None:
        """The spelling of a token, or None for padding."""
        spelling: str | None = self._backend.id_to_token(index) if 0 <= index < self.size else None
        return spelling

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, ascending: all that generation_config, config and tokenizer_config name."""
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.directory / name).get("eos_token_id")
            ids.update(found if isinstance(found, list) else [found] if isinstance(found, int) else [])
        spelled = self.token_id(self._special_names.get("eos_token", ""))
        return tuple(sorted(ids | ({spelled} if spelled is not None else set())))

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the tokenizer names one."""
        return self.token_id(self._special_names.get("bos_token", ""))

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """The data that the fingerprint hashes.

        Cached, and as large as the vocabulary: for tools, not for the hot path.
        """
        return TokenizerIdentity.read(self.directory / "tokenizer.json")

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits; equal for equal tokenizers only (see the module `fingerprint`)."""
        return TokenizerIdentity.read(self.directory / "tokenizer.json").fingerprint

    @cached_property
    def _chat_template(self) -> Any:
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        separate = _read_json(self.directory / "chat_template.json").get("chat_template")
        return separate or self._config.get("chat_template")


def own_file(directory: Path, name: str) -> Path | None:
    """Where a file of a model's directory lies; None for a link that leads out of it: its target may be anybody's file.

    In a Hugging Face cache each file is a link to a blob, which is the model's own. Raises OSError for a broken link.
    """
    root, place = directory.resolve(), (directory / name).resolve(strict=True)
    is_cached = root.parent.name == "snapshots"
    is_own = place.is_relative_to(root) or (is_cached and place.is_relative_to(root.parents[1] / "blobs"))
    return place if is_own else None


def require_same_tokenizer(a: Tokenizer, b: Tokenizer) -> None:
    """Raises TokenizerMismatch, naming both and the first difference, unless the fingerprints are equal."""
    if a.fingerprint == b.fingerprint:
        return
    raise TokenizerMismatch(
        f"{a.name} (tokenizer {a.fingerprint[:12]}) and {b.name} (tokenizer {b.fingerprint[:12]}) do not "
        f"share one tokenizer; first difference: {a.identity.first_difference(b.identity)}. Use a draft with this "
        "target's tokenizer"
    )


def _special_names(*sources: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like by name; each is a string or an object with `content`."""
    names: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            spelled = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(spelled, str):
                names.setdefault(key, spelled)
    return names


def _stated_limit(directory: Path) -> int | None:
    """The vocab_size of config.json, or of its text_config; None where there is none."""
    config = _read_json(directory / "config.json")
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("vocab_size")
    return found if isinstance(found, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}); copy it from the model again") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} holds a {type(found).__name__}, expected an object; copy it from the model again")
    return found
