"""Reads the LoRA adapters of `--lora NAME=DIR` before the start: PEFT's `adapter_config.json` and safetensors.

vLLM reads these two files and no other; both are data. What vLLM would load and compute wrongly is refused here, what
it refuses itself is said at the start. Knows no vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.models.bundle.bundle import hash_file
from outrider.models.errors import ConfigError

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM has room, the same for all adapters."""
MAX_ADAPTERS: Final = 32
"""Each takes GPU memory for as many values as the largest, and its name is a label of metrics."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
_MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 100 << 20
"""The format's own bound."""
_TENSOR: Final = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.weight)?"
)
_OUTPUT_LAYER: Final = "lm_head"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter. path: absolute. rank: its largest. digest: of what decides logits."""

    name: str
    path: Path
    rank: int
    digest: str


def read_adapters(given: Sequence[str], model: Path, names: Iterable[str], *, is_v2: bool) -> tuple[Adapter, ...]:
    """The adapters, in the order given. Raises ConfigError for one that cannot be served with the model.

    given: as on the command line. model: its directory. names: of the model, which no adapter may have. is_v2: whether
    vLLM's V2 model runner runs them.
    """
    if len(given) > MAX_ADAPTERS:
        raise ConfigError(f"--lora is given {len(given)} times; at most {MAX_ADAPTERS} adapters are served")
    files = model.glob("*.safetensors") if given else ()
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    taken, found = set(names), list[Adapter]()
    for text in given:
        name, separator, directory = text.partition("=")
        if not separator or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--lora is {text!r}; expected NAME=DIR, with a name of up to 64 letters, digits, and . _ : / -"
            )
        if name in taken:
            raise ConfigError(f"--lora {text}: {name} is the name of another model here; give each its own")
        taken.add(name)
        found.append(_read(name, Path(directory), shapes, is_v2=is_v2))
    return tuple(found)


def rank_of(adapters: Iterable[Adapter]) -> int:
    """The rank for which vLLM makes room."""
    most = max(adapter.rank for adapter in adapters)
    return next(rank for rank in RANKS if rank >= most)


def with_adapters(
    arguments: dict[str, Any], adapters: Sequence[Adapter], max_running: int, *, is_cpu: bool
) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs`, with room for adapters: each has its place, so no step waits for one.

    max_running: sequences of a step.
    """
    if not adapters:
        return arguments
    # vLLM wants a step to have room for the drafts of all sequences at once. No step has more rows than tokens.
    num_tokens = arguments["max_num_batched_tokens"]
    num_rows = 1 + arguments["speculative_config"]["num_speculative_tokens"]
    num_sequences = min(arguments["max_num_seqs"], max(max_running, num_tokens // num_rows))
    return arguments | {
        "enable_lora": True,
        # Beside rows with an adapter, vLLM's CPU build runs the base's with the last place's: that one stays empty.
        "max_loras": len(adapters) + is_cpu,
        "max_lora_rank": rank_of(adapters),
        "max_num_seqs": num_sequences,
        "max_num_batched_tokens": max(num_tokens, num_sequences * num_rows),
        "max_num_scheduled_tokens": num_tokens,
    }


def _read(name: str, path: Path, shapes: Mapping[str, tuple[int, ...]], *, is_v2: bool) -> Adapter:
    config, weights = path / CONFIG_NAME, path / WEIGHTS_NAME
    if not weights.is_file():
        raise ConfigError(
            f"--lora {name}={path}: there is no {WEIGHTS_NAME}; weights in other formats are not loaded: save the "
            "adapter as safetensors"
        )
    rank = _rank(config)
    for tensor, shape in _shapes(weights).items():
        matched = _TENSOR.fullmatch(tensor)
        layer, kind = matched.groups() if matched else (tensor, "")
        if is_v2 and layer.rsplit(".", 1)[-1] == _OUTPUT_LAYER:
            raise ConfigError(
                f"--lora {name}={path}: it adapts the output layer ({tensor}), which vLLM's V2 model runner maps to "
                "wrong rows where drafts are verified; train it without"
            )
        base = shapes.get(f"{layer}.weight")
        if base is not None and kind and not _fits(kind, shape, base):
            raise ConfigError(
                f"--lora {name}={path}: {tensor} has the shape {list(shape)}, and the model's layer {list(base)}; it "
                "was made for another model"
            )
    return Adapter(name, path.resolve(), rank, "".join(map(hash_file, (config, weights))))


def _fits(kind: str, shape: tuple[int, ...], base: tuple[int, ...]) -> bool:
    """Whether a tensor is a factor of the base: B [out, r] times A [r, in], or, in embeddings, its transpose."""
    if len(shape) != 2 or len(base) != 2:
        return False
    return {
        "lora_A": shape[1] == base[1],
        "lora_B": shape[0] == base[0],
        "lora_embedding_A": shape[1] == base[0],
        "lora_embedding_B": shape[0] == base[1],
    }[kind]


def _rank(path: Path) -> int:
    """The largest rank that an adapter's configuration states. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            read = file.read(_MAX_CONFIG_BYTES + 1)
        config: Any = json.loads(read) if len(read) <= _MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give an adapter's directory") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{path} is not of a LoRA adapter; expected peft_type LORA, as PEFT writes it")
    patterns = config.get("rank_pattern") or {}
    ranks: list[Any] = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    most = RANKS[-1]
    if not all(isinstance(rank, int) and not isinstance(rank, bool) and 1 <= rank <= most for rank in ranks):
        raise ConfigError(f"{path}: a rank is not a whole number from 1 to {most}")
    return max(map(int, ranks))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors, by name. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not safetensors, or cut short ({error}); copy it again") from None
