"""Computes the source's logits in torch and FP32, which every export is compared with.

They are kept as files between stages, so that an interrupted export, or another precision of the same model, does not
load the source again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.export.source.config_reader import LONGEST_CHECKED
from outrider.export.source.model_source import REFERENCE_ROOT, SourceModel
from outrider.export.source.prompts import BUILT_IN_PROMPTS, MAX_PROMPTS, read_prompts
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.models.errors import ExportError
from outrider.models.text.tokenizer import Tokenizer

PARITY_TEXT: Final = (
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) "
    "% 2:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n\n"
    "The median of an even number of values is the mean of the two in the middle; it moves little when one "
    "value is far off, which is why the figures of a benchmark are given as medians of several runs.\n"
)
LEAST_POSITIONS: Final = 24
"""The longest sequence of an export must have room for the shortest check."""
_PREFILL: Final = 48
SINGLE: Final = 8
MULTI: Final = 8
KEPT: Final = 3
ROLLED: Final = 6
_BEYOND: Final = 16
"""Tokens by which the first step beyond a window goes beyond it."""
BEFORE: Final = 4
"""Tokens by which the first step across an original length stays before it, so that single steps cross it."""

# 144 rows of 152,000 columns are 88 MB.
_MAX_TEXTS: Final = 6
_MAX_TOKENS: Final = 24
_SAME: Final = 1e-3
"""Of the largest logit: rounding is far below it, a token that sees those after it far above."""


class Logits(Protocol):
    """The source."""

    def __call__(self, tokens: Sequence[int], num_rows: int = 0) -> NDArray[np.float32]:
        """Logits after the last `num_rows` of a whole sequence (0: after all), [rows, vocab_size]."""
        ...


@dataclass(frozen=True, slots=True)
class SequencePair:
    """Two sequences that share a beginning, and the source's logits after the last tokens of each.

    prefill: tokens of the first step. main_logits: [compared rows of the first step + the rest of main, vocab_size];
    other_logits: [what differs from main, vocab_size].
    """

    prefill: int
    main: tuple[int, ...]
    other: tuple[int, ...]
    main_logits: NDArray[np.float32]
    other_logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ParityReference:
    """The source's logits.

    near: where nothing depends on the length. beyond: pairs that go beyond each sliding window, and across the
    positions before rotary scaling as far as real sequences get, by a stage's words for the place. has_windows: whether
    any is beyond a window. originals: positions before rotary scaling, each of which batches cross.
    """

    near: SequencePair
    beyond: Mapping[str, SequencePair] = field(default_factory=dict)
    has_windows: bool = False
    originals: tuple[int, ...] = ()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Its content, for a file of arrays."""
        pairs = [self.near, *self.beyond.values()]
        arrays = {
            f"{name}_{index}": np.array(v) for index, pair in enumerate(pairs) for name, v in asdict(pair).items()
        }
        flags = {"has_windows": np.array(self.has_windows), "originals": np.array(self.originals, np.int64)}
        return arrays | flags | {"places": np.array(list(self.beyond), np.str_)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> ParityReference:
        """Reads what `to_arrays` gave."""
        places = arrays["places"].tolist()
        pairs = [
            SequencePair(
                int(arrays[f"prefill_{index}"]),
                tuple(arrays[f"main_{index}"].tolist()),
                tuple(arrays[f"other_{index}"].tolist()),
                arrays[f"main_logits_{index}"],
                arrays[f"other_logits_{index}"],
            )
            for index in range(1 + len(places))
        ]
        beyond = dict(zip(places, pairs[1:], strict=True))
        return cls(pairs[0], beyond, bool(arrays["has_windows"]), tuple(arrays["originals"].tolist()))


def make_reference(
    tokenizer: Tokenizer,
    logits_of: Logits,
    longest: int,
    windows: Sequence[int] = (),
    originals: Sequence[int] = (),
) -> ParityReference:
    """Runs the source once per sequence: two of at most 64 tokens, and for each window two of at most window + 32.

    longest: the export's longest sequence, at least LEAST_POSITIONS: none is longer. originals: positions before rotary
    scaling; up to LONGEST_CHECKED, two sequences of at most original + 12 for each.
    """
    near = _sequence_pair(tokenizer, logits_of, _PREFILL, _PREFILL, longest)
    # Of such a long step only the last row is compared: all rows would be gigabytes with a large vocabulary, and an
    # error in an earlier row is in the keys and values that later steps attend.
    starts = {f", beyond the window of {window}": window + _BEYOND for window in windows if window < longest}
    has_windows = bool(starts)
    for original in originals:
        if BEFORE < original <= min(LONGEST_CHECKED, longest - 1):
            starts[f", across the original length of {original}"] = original - BEFORE
    beyond = {place: _sequence_pair(tokenizer, logits_of, start, 1, longest) for place, start in starts.items()}
    crossed = tuple(original for original in originals if original < longest)
    return ParityReference(near, beyond, has_windows, crossed)


def _sequence_pair(tokenizer: Tokenizer, logits_of: Logits, prefill: int, compared: int, longest: int) -> SequencePair:
    prefill = min(prefill, longest - SINGLE - MULTI)
    compared = min(compared, prefill)
    length = prefill + SINGLE + MULTI
    text = _text(tokenizer, length + ROLLED)
    # What replaces the rolled-back tokens must differ from them, or stale slots would go unnoticed.
    other = (*text[: prefill + KEPT], *text[::-1][:ROLLED])
    main = text[:length]
    return SequencePair(
        prefill, main, other, logits_of(main, compared + length - prefill).copy(), logits_of(other, ROLLED).copy()
    )


def _text(tokenizer: Tokenizer, length: int) -> tuple[int, ...]:
    """PARITY_TEXT, then its tokens in other orders: plain repetition would hide an error far back."""
    once = tokenizer.encode(PARITY_TEXT)
    text = list(once)
    for seed in range(length // len(once)):
        text += np.random.default_rng(seed).permutation(once).tolist()
    return tuple(text[:length])


@dataclass(frozen=True, slots=True)
class Truth:
    """reference: of the parity check. texts: held-out ones, as ids. logits: the source's on each, [length, vocab]."""

    reference: ParityReference
    texts: tuple[tuple[int, ...], ...]
    logits: tuple[NDArray[np.float32], ...]

    def save(self, directory: Path) -> None:
        """Writes it to `directory`."""
        arrays = self.reference.to_arrays()
        for index, (text, logits) in enumerate(zip(self.texts, self.logits, strict=True)):
            arrays |= {f"text_{index}": np.array(text), f"logits_{index}": logits}
        np.savez(directory / "truth.npz", allow_pickle=False, **arrays)

    @classmethod
    def load(cls, directory: Path) -> Truth:
        """Reads what `save` wrote."""
        with np.load(directory / "truth.npz", allow_pickle=False) as arrays:
            count = sum(name.startswith("text_") for name in arrays.files)
            return cls(
                ParityReference.from_arrays(arrays),
                tuple(tuple(arrays[f"text_{index}"].tolist()) for index in range(count)),
                tuple(arrays[f"logits_{index}"] for index in range(count)),
            )


class LoadedSource:
    """The source model, loaded on first use and freed by `let_go`: no stage holds it beside its own result.

    longest: the export's longest sequence.
    """

    def __init__(self, source: SourceModel, longest: int, on_load: Callable[[], None]) -> None:
        self._source = source
        self._longest = longest
        self._on_load = on_load
        self._model: Any = None

    def model(self) -> Any:
        """The transformers model in FP32."""
        if self._model is None:
            self._on_load()
            self._model = load_source_model(self._source.path)
        return self._model

    def to_convert(self) -> Any:
        """The model with its rotary frequencies as they are within the export's positions: nothing changes them there.

        Converters cannot express frequencies that depend on a step's longest position. The source's logits are
        computed before, so that the check compares with the model as it was.
        """
        model = self.model()
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if kind is not None:
                module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
                for name, values in list(module.named_buffers(recurse=False)):
                    module.register_buffer(name, values.clone(), persistent=False)  # a tracer takes none twice
        return model

    def let_go(self) -> None:
        """Frees it."""
        self._model = None
        gc.collect()

    def tell_truth(self) -> Truth:
        """Runs the source over the texts of the check and over held-out ones.

        Raises ExportError for a model that attends both ways.
        """
        logits_of = partial(source_logits, self.model())
        source = self._source
        texts = tuple(text[: self._longest] for text in held_out_texts(source))
        reference = make_reference(
            source.tokenizer, logits_of, self._longest, source.windows, source.original_positions
        )
        _require_causal(source, reference.near, logits_of)
        return Truth(reference, texts, tuple(logits_of(text) for text in texts))


def _require_causal(source: SourceModel, pair: SequencePair, logits_of: Logits) -> None:
    """Raises ExportError if a token's logits change with those after it."""
    num_rows = len(pair.main) // 2
    expected = pair.main_logits[:num_rows]
    if np.abs(logits_of(pair.main[:num_rows]) - expected).max() <= _SAME * np.abs(expected).max():
        return
    kind = "is an encoder (is_decoder is false)" if source.facts.get("is_decoder") is False else "attends both ways"
    raise ExportError(
        f"{source.name} {kind}: its logits for a token change with the tokens after it, so it cannot write a text "
        "token by token; expected a decoder"
    )


def prompts_for(source: SourceModel) -> Sequence[str]:
    """The prompts held out for this model if it is of the reference pair, otherwise the built-in ones."""
    own = source.path.parent / "prompts.json"
    is_reference = source.path.parent == REFERENCE_ROOT
    return read_prompts(own)[:MAX_PROMPTS] if is_reference and own.is_file() else BUILT_IN_PROMPTS


def held_out_texts(source: SourceModel) -> tuple[tuple[int, ...], ...]:
    """Beginnings of the prompts, as ids; a few dozen rows of logits each."""
    ids = [tuple(source.tokenizer.encode(text)[:_MAX_TOKENS]) for text in prompts_for(source)]
    return tuple(text for text in ids if text)[:_MAX_TEXTS]
