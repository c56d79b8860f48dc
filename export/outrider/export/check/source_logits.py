"""Computes the source's logits in torch and FP32, which every export is compared with.

They are kept as files between stages, so that an interrupted export, or another precision of the same model, does not
load the source again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.source.config_reader import LONGEST_CHECKED
from outrider.export.source.model_source import REFERENCE_ROOT, SourceModel
from outrider.export.source.prompts import BUILT_IN_PROMPTS, MAX_PROMPTS, read_prompts
from outrider.export.source.torch_source import source_logits
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

_FILE: Final = "truth.npz"
# 144 rows of 152,000 columns are 88 MB.
_MAX_TEXTS: Final = 6
_MAX_TOKENS: Final = 24
_SAME: Final = 1e-3
"""Of the largest logit: rounding is far below it, a token that sees those after it far above."""


Logits = Callable[..., NDArray[np.float32]]
"""The source: takes the tokens of a whole sequence and a number of rows; gives the logits after the last so many tokens
(after all without a number), [rows, vocab_size].
"""


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
    starts |= {
        f", across the original length of {original}": original - BEFORE
        for original in originals
        if BEFORE < original <= min(LONGEST_CHECKED, longest - 1)
    }
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
        reference = self.reference
        pairs = {"": reference.near, **reference.beyond}
        numbers = {
            "pairs": {place: (pair.prefill, pair.main, pair.other) for place, pair in pairs.items()},
            "has_windows": reference.has_windows,
            "originals": reference.originals,
            "texts": self.texts,
        }
        logits = [rows for pair in pairs.values() for rows in (pair.main_logits, pair.other_logits)]
        np.savez(directory / _FILE, *logits, *self.logits, numbers=np.array(json.dumps(numbers)), allow_pickle=False)

    @classmethod
    def load(cls, directory: Path) -> Truth:
        """Reads what `save` wrote."""
        with np.load(directory / _FILE, allow_pickle=False) as arrays:
            numbers = json.loads(str(arrays["numbers"]))
            logits = iter([arrays[name] for name in arrays.files if name != "numbers"])
        pairs = {
            place: SequencePair(prefill, tuple(main), tuple(other), next(logits), next(logits))
            for place, (prefill, main, other) in numbers["pairs"].items()
        }
        reference = ParityReference(pairs.pop(""), pairs, numbers["has_windows"], tuple(numbers["originals"]))
        return cls(reference, tuple(map(tuple, numbers["texts"])), tuple(logits))


def steady_rotations(model: Any) -> Any:
    """The model with its rotary frequencies as they are within the export's positions: nothing changes them there.

    Converters cannot express frequencies that depend on a step's longest position. The source's logits are computed
    before, so that the check compares with the model as it was.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is not None:
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            for name, values in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, values.clone(), persistent=False)  # a tracer takes none twice
    return model


def compute_truth(model: Any, source: SourceModel, longest: int) -> Truth:
    """Runs the source, loaded in FP32, over the texts of the check and over held-out ones.

    longest: the export's longest sequence. Raises ExportError for a model that attends both ways.
    """
    logits_of = partial(source_logits, model)
    texts = tuple(text[:longest] for text in held_out_texts(source))
    windows, originals = source.shape.checked_windows, source.shape.crossed_originals
    reference = make_reference(source.tokenizer, logits_of, longest, windows, originals)
    _require_causal(source, reference.near, logits_of)
    return Truth(reference, texts, tuple(logits_of(text) for text in texts))


def _require_causal(source: SourceModel, pair: SequencePair, logits_of: Logits) -> None:
    """Raises ExportError if a token's logits change with those after it."""
    num_rows = len(pair.main) // 2
    expected = pair.main_logits[:num_rows]
    if np.abs(logits_of(pair.main[:num_rows]) - expected).max() <= _SAME * np.abs(expected).max():
        return
    kind = (
        "is an encoder (is_decoder is false)" if source.shape.facts.get("is_decoder") is False else "attends both ways"
    )
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
