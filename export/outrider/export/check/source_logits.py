"""Computes the source's logits in torch and FP32, which every export is compared with.

They are kept as files between stages, so that an interrupted export, or another precision of the same model, does not
load the source again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.check.parity import Logits, ParityReference, SequencePair, make_reference
from outrider.export.source.model_source import REFERENCE_ROOT, SourceModel
from outrider.export.source.prompts import BUILT_IN_PROMPTS, MAX_PROMPTS, read_prompts
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.models.errors import ExportError

# 144 rows of 152,000 columns are 88 MB.
_MAX_TEXTS: Final = 6
_MAX_TOKENS: Final = 24
_SAME: Final = 1e-3
"""Of the largest logit: rounding is far below it, a token that sees those after it far above."""


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
