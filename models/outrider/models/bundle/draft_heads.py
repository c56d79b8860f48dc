"""Computes the guesses of Medusa-style heads (Cai et al. 2024, arXiv 2401.10774) from a target's last hidden state.

Head k guesses the token k + 2 places after the one whose hidden state it gets; the target itself guesses the next one.
A head is one residual block, h + SiLU(W h + b), in front of the target's own LM head, which all heads share and which
is not trained. The file is safetensors: a JSON header and plain numbers, so loading it executes nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import BundleError

HEADS_FILE: Final = "draft_heads/heads.safetensors"
"""Its place in a bundle: in a folder of its own, because loaders of a directory read every safetensors file in it."""
FORMAT: Final = "outrider draft heads 1"
_MAX_HEADER: Final = 1 << 16
_DTYPES: Final = {"F32": np.float32, "F16": np.float16}


@dataclass(frozen=True, slots=True, eq=False)
class DraftHeads:
    """weights: [K, H, H], biases: [K, H], unembedding: [V, H], bias: [V]; all float32."""

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]
    unembedding: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def load(cls, path: Path) -> DraftHeads:
        """Reads the file. Raises BundleError for anything but heads whose shapes fit each other."""
        tensors = _read_safetensors(path)
        if set(tensors) != {"weights", "biases", "unembedding", "bias"}:
            raise BundleError(f"{path} has tensors {sorted(tensors)}, not those of heads; train the heads again")
        heads = cls(**{name: tensor.astype(np.float32) for name, tensor in tensors.items()})
        count, size, vocab = len(heads.biases), heads.hidden_size, heads.vocab_size
        shapes = [heads.weights.shape, heads.biases.shape, heads.unembedding.shape, heads.bias.shape]
        if shapes != [(count, size, size), (count, size), (vocab, size), (vocab,)] or count == 0:
            raise BundleError(f"{path} has shapes {shapes}, which do not fit each other; train the heads again")
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise BundleError(f"{path} has numbers that are not finite; train the heads again")
        return heads

    @property
    def count(self) -> int:
        """How many heads."""
        return len(self.weights)

    @property
    def hidden_size(self) -> int:
        """Of the hidden state that they take."""
        return int(self.biases.shape[-1])

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self.unembedding.shape[0])

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[K, V] float32 from one hidden state [H]: row k is for the token k + 2 places after it."""
        inner = self.weights @ hidden + self.biases
        with np.errstate(over="ignore"):  # exp of a very negative number: the sigmoid is 0
            states = hidden + inner / (1.0 + np.exp(-inner))
        logits: NDArray[np.float32] = (states @ self.unembedding.T + self.bias).astype(np.float32, copy=False)
        return logits


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a small safetensors file. Raises BundleError for what is none, or not of FORMAT."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error}); copy the bundle again") from None
    try:
        size = int.from_bytes(data[:8], "little")
        if not 2 <= size <= min(_MAX_HEADER, len(data) - 8):
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(data[8 : 8 + size])
        if header.pop("__metadata__", {}).get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        body = memoryview(data)[8 + size :]
        return {name: _tensor(entry, body) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} holds no draft heads ({error}); train the heads again") from None


def _tensor(entry: dict[str, Any], body: memoryview) -> NDArray[Any]:
    dtype, shape, (start, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * dtype.itemsize or min(shape) < 1:
        raise ValueError("a tensor outside the file, or of another size than its shape")
    return np.frombuffer(body[start:end], dtype).reshape(shape)
