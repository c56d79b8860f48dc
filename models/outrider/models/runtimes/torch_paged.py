"""Runs a `BatchRuntime` on torch and transformers: the plain twin that tests compare with on CPU, the runtime for CUDA.

All new tokens of a step go through the model as one packed row, so no layer computes padding. Only attention separates
sequences: it writes the new keys and values to their slots, then sequences with the same number of new tokens attend
together, their contexts padded to the longest. Padding reads a slot that stays zero: a masked key or value that is not
finite would still reach the sum (0 * NaN is NaN), and every other slot may hold what a fault left. Layers may attend a
sliding window, or cap their logits (Gemma 2). Supports architectures that use transformers' attention interface, as
most do; others (Bloom, GPT-Neo) are detected when the model is loaded, and refused. Not run on CUDA hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from outrider.models.errors import BundleError, ConfigError, ModelFault, RuntimeUnavailable
from outrider.models.runtimes.base import PROMISED_POSITIONS, ModelLimits, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.ragged import RaggedStep, begins, lay_out
from outrider.models.runtimes.torch_reference import load_causal_lm
from outrider.models.sampling import SamplingParams
from outrider.models.sampling_torch import pick_rows

BLOCK_SIZE: Final = 32
_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_ATTENTION: Final = "outrider_paged"


@dataclass(frozen=True, slots=True)
class _Group:
    """G sequences with n new tokens each, contexts padded to C.

    rows: [G * n] their indices among the packed tokens. slots: [G, C]. mask: [G, 1, n, C] bool, true where attended.
    positions: [G, n] of the new tokens; slot_positions: [G, C].
    windowed: masks by the size of the sliding window, made when a layer first needs one.
    """

    num_sequences: int
    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    slot_positions: torch.Tensor
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_within(self, window: int | None) -> torch.Tensor:
        """`mask`, limited to positions less than `window` back."""
        if window is None:
            return self.mask
        if window not in self.windowed:
            distances = self.positions[:, None, :, None] - self.slot_positions[:, None, None, :]
            self.windowed[window] = self.mask & (distances < window)
        return self.windowed[window]


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """What every layer's attention needs in one step; `cache` is [layers, 2, slots + 1, kv_heads, head_size].

    attended: the layers that have attended so far.
    """

    cache: torch.Tensor
    new_slots: torch.Tensor
    groups: list[_Group]
    attended: set[int] = field(default_factory=set)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: _AttentionPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, T, head_size], key and value [1, kv_heads, T, head_size]."""
    if options.get("s_aux") is not None:
        raise ModelFault("this architecture's attention has sinks (s_aux), which the torch runtime does not support")
    plan.attended.add(module.layer_idx)
    keys, values = plan.cache[module.layer_idx]
    keys[plan.new_slots] = key[0].transpose(0, 1).to(keys.dtype)
    values[plan.new_slots] = value[0].transpose(0, 1).to(values.dtype)
    packed = query[0].transpose(0, 1)  # [T, heads, head_size]
    attended = torch.empty_like(packed)
    for group in plan.groups:
        queries = packed[group.rows].reshape(group.num_sequences, -1, *packed.shape[1:])
        operands = (
            queries.transpose(1, 2),
            keys[group.slots].transpose(1, 2).to(query.dtype),
            values[group.slots].transpose(1, 2).to(query.dtype),
            group.mask_within(sliding_window),
        )
        result = (
            torch.nn.functional.scaled_dot_product_attention(*operands, scale=scaling, enable_gqa=True)
            if softcap is None
            else _capped_attention(*operands, scaling, softcap)
        )
        attended[group.rows] = result.transpose(1, 2).flatten(0, 1)
    return attended[None], None


def _capped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """Attention with logits capped by softcap * tanh(logits / softcap): [G, heads, n, head_size]."""
    repeats = queries.shape[1] // keys.shape[1]
    logits = (queries @ keys.repeat_interleave(repeats, dim=1).transpose(2, 3)).float() * scaling
    capped = softcap * torch.tanh(logits / softcap)
    weights = capped.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(values.dtype)
    return weights @ values.repeat_interleave(repeats, dim=1)


class TorchPagedRuntime:
    """Ragged batches, tree masks included, of a Hugging Face directory (safetensors, no remote code)."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the model; `options.properties["dtype"]` is "f32", "bf16" or "f16", by default f32 on CPU, else bf16.

        Raises BundleError when transformers cannot load the directory or this runtime does not support its attention,
        ConfigError for an option out of range, RuntimeUnavailable when the device is missing.
        """
        self._path = path
        self._device = _device(options.device)
        dtype = _dtype("dtype", options.properties.get("dtype", "f32" if self._device.type == "cpu" else "bf16"))
        cache_dtype = dtype if options.kv_precision == "auto" else _dtype("kv_precision", options.kv_precision)
        if options.num_threads and self._device.type == "cpu":
            torch.set_num_threads(options.num_threads)
        transformers.AttentionInterface.register(_ATTENTION, _attend)
        try:
            model = load_causal_lm(path, dtype, _ATTENTION)
        except KeyError as error:  # some families look the name up in a table of their own
            raise BundleError(_unfit(path, "it has its own table of attention functions")) from error
        self._model: Any = model.to(self._device).eval()
        config: Any = model.config.get_text_config()
        self._limits = ModelLimits(config.vocab_size, 1)  # until _require_interface has run one token
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slot = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_size)
        block_bytes = 2 * config.num_hidden_layers * BLOCK_SIZE * int(np.prod(slot)) * cache_dtype.itemsize
        self._num_blocks: int = options.kv_cache_bytes // block_bytes
        if self._num_blocks < 1:
            raise ConfigError(
                f"kv_cache_bytes is {options.kv_cache_bytes}; one block of this model takes {block_bytes}"
            )
        self._padding_slot = self._num_blocks * BLOCK_SIZE  # behind the last block, so that no block table names it
        shape = (config.num_hidden_layers, 2, self._padding_slot + 1, *slot)
        self._cache = torch.zeros(shape, dtype=cache_dtype, device=self._device)
        self._require_interface(path)
        self._limits = ModelLimits(config.vocab_size, _max_positions(model.config, options))

    def _require_interface(self, path: Path) -> None:
        """Runs one token to check that every layer attends through `_attend`: a layer that does not has no cache."""
        try:
            self._logits([SequenceSlice([0], 0, [0], 1)])
        except ModelFault as error:
            raise BundleError(str(error)) from error
        except Exception as error:  # an architecture may raise anything for unknown arguments
            raise BundleError(_unfit(path, f"{type(error).__name__}: {error}")) from error

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""
        return self._limits

    @property
    def block_size(self) -> int:
        """Tokens a cache block holds."""
        return BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache; valid numbers are 0 .. num_blocks - 1."""
        return self._num_blocks

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32.

        Blocking, one thread at a time. Writes the new tokens' slots and nothing else.
        """
        logits: NDArray[np.float32] = self._logits(batch).cpu().numpy()
        return logits

    def forward_picks(
        self, batch: Sequence[SequenceSlice], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | None]:
        """As `forward`, but picks each row's token where the logits are; None for a row that is not finite."""
        logits = self._logits(batch)
        return pick_rows(logits, params, positions) if len(logits) else []

    @torch.inference_mode()
    def _logits(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        step = lay_out(
            batch,
            vocab_size=self._limits.vocab_size,
            max_positions=self._limits.max_positions,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
        )
        num_new = np.diff(step.subsequence_begins)
        plan = _AttentionPlan(
            cache=self._cache,
            new_slots=self._tensor(step.slots(BLOCK_SIZE, step.past_lens, num_new)),
            groups=self._groups(step, num_new),
        )
        output = self._model(
            input_ids=self._tensor(step.input_ids)[None],
            position_ids=self._tensor(step.position_ids)[None],
            use_cache=False,
            logits_to_keep=self._tensor(step.logit_rows),
            plan=plan,
        )
        if len(plan.attended) != len(self._cache):
            raise ModelFault(_unfit(self._path, f"{len(plan.attended)} of {len(self._cache)} layers attend through it"))
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _groups(self, step: RaggedStep, num_new: NDArray[np.integer]) -> list[_Group]:
        contexts = step.past_lens + num_new
        flat_slots = step.slots(BLOCK_SIZE, np.zeros_like(contexts), contexts)
        starts = begins(contexts)
        groups = []
        for n in np.unique(num_new):
            members = np.flatnonzero(num_new == n)
            longest = int(contexts[members].max())
            slots = np.full((members.size, longest), self._padding_slot)
            mask = np.zeros((members.size, 1, n, longest), np.bool_)
            positions = np.zeros((members.size, n), np.int64)
            slot_positions = np.tile(np.arange(longest), (members.size, 1))
            for g, b in enumerate(members):
                past, context = step.past_lens[b], contexts[b]
                slots[g, :context] = flat_slots[starts[b] : starts[b + 1]]
                positions[g] = step.position_ids[step.subsequence_begins[b] : step.subsequence_begins[b + 1]]
                slot_positions[g, past:context] = positions[g]
                mask[g, 0, :, :past] = True
                mask[g, 0, :, past:context] = (
                    step.mask[step.mask_begins[b] : step.mask_begins[b + 1]].reshape(n, n)
                    if step.mask.size
                    else np.tri(n, dtype=np.bool_)
                )
            rows = (step.subsequence_begins[members][:, None] + np.arange(n)).reshape(-1)
            groups.append(
                _Group(
                    num_sequences=members.size,
                    rows=self._tensor(rows),
                    slots=self._tensor(slots),
                    mask=self._tensor(mask),
                    positions=self._tensor(positions),
                    slot_positions=self._tensor(slot_positions),
                )
            )
        return groups

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._model = None
        self._cache = torch.empty(0)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name.lower())
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; expected a torch device such as cpu or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeUnavailable(f"torch {torch.__version__} sees no CUDA device for {name!r}")
    return device


def _dtype(option: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"{option} is {name!r}; the torch runtime takes {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _max_positions(config: Any, options: RuntimeOptions) -> int:
    """The longest sequence: the exporter's, else the model's own, cut to `options.max_positions`."""
    promised = getattr(config, PROMISED_POSITIONS, None)
    own = promised or getattr(config.get_text_config(), "max_position_embeddings", None) or options.max_positions
    if not own:
        raise ConfigError("the model's config.json does not give max_position_embeddings; set max_positions")
    return min(int(own), options.max_positions or int(own))


def _unfit(path: Path, why: str) -> str:
    return f"the model in {path} does not use transformers' attention interface as the torch runtime needs it: {why}"
