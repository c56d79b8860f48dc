"""Holds a paged KV cache in torch tensors, moves its slots and blocks, and attends over them. Knows no model.

Attention goes both ways that transformers' families leave open. `attend` is a function of transformers' attention
interface, for families that use it; `GroupCache` is a transformers cache, for families with attention of their own.
Both find what a step needs in its `AttentionPlan`.

Behind the last block lies one slot that stays zero: what pads a context reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from outrider.models.errors import ConfigError, ModelFault

if TYPE_CHECKING:
    from outrider.models.runtimes.triton_attention import StepPages

BLOCK_SIZE: Final = 32


def has_kernels(device: torch.device) -> bool:
    """Whether attention runs in Triton. Else through SDPA, which gathers and masks all keys of a step."""
    return device.type == "cuda" and find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Group:
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
class LayerCache:
    """One layer's keys and values, [slots + 1, kv_heads, size]; the two sizes differ in multi-head latent attention."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the new tokens' key and value, [G, kv_heads, n, size] with G * n slots."""
        self.keys[slots] = key.transpose(1, 2).flatten(0, 1).to(self.keys.dtype)
        self.values[slots] = value.transpose(1, 2).flatten(0, 1).to(self.values.dtype)

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` [G, C]: [G, kv_heads, C, size] each."""
        return self.keys[slots].transpose(1, 2).to(dtype), self.values[slots].transpose(1, 2).to(dtype)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slots to slots: both [N] int64. All are read before one is written."""
        self.keys[targets] = self.keys[sources]
        self.values[targets] = self.values[sources]


SlotShape = tuple[tuple[int, int], tuple[int, int]]
"""(kv_heads, size) of a layer's keys and of its values."""


class TorchCache:
    """Keys and values of all layers, by layer; none before `_allocate`. num_blocks: blocks; block_bytes: of one block
    over all layers.
    """

    block_size: int = BLOCK_SIZE
    why_no_blocks: str | None = None
    """Blocks can be read and written, on a GPU too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: dict[int, LayerCache] | None = None
        self.num_blocks = self.block_bytes = self._padding_slot = 0

    def _allocate(self, shapes: Mapping[int, SlotShape], dtype: torch.dtype, num_bytes: int) -> None:
        """Makes zeroed tensors of at most `num_bytes`. Raises ConfigError where these do not hold one block."""
        elements = sum(heads * size for shape in shapes.values() for heads, size in shape)
        self.block_bytes = BLOCK_SIZE * elements * dtype.itemsize
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(f"kv_cache_bytes is {num_bytes}; one block of this model takes {self.block_bytes}")
        self._padding_slot = self.num_blocks * BLOCK_SIZE  # behind the last block, so that no block table names it

        def zeros(slot: tuple[int, int]) -> torch.Tensor:
            return torch.zeros((self._padding_slot + 1, *slot), dtype=dtype, device=self._device)

        self._layers = {layer: LayerCache(zeros(keys), zeros(values)) for layer, (keys, values) in shapes.items()}

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of all layers from slots to slots: an indexed copy per layer."""
        assert len(sources) == len(targets)
        assert min(*sources, *targets) >= 0 and max(*sources, *targets) < self._padding_slot, "a slot outside the cache"
        read, written = torch.tensor([sources, targets], dtype=torch.int64, device=self._device)
        for layer in (self._layers or {}).values():
            layer.move(read, written)

    @property
    def block_layout(self) -> tuple[str, ...]:
        """Type and shape of each cache tensor's part of a block."""
        return tuple(f"{part.dtype}{[BLOCK_SIZE, *part.shape[1:]]}" for part in self._parts())

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these blocks over all layers: [len(blocks), bytes of a block]."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self._device)
        data: NDArray[np.uint8] = torch.cat([part[chosen] for part in self._blocks()], dim=1).cpu().numpy()
        return data

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what `read_blocks` gave."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self._device)
        given = torch.from_numpy(data).to(self._device)
        start = 0
        for part in self._blocks():
            part[chosen] = given[:, start : start + part.shape[1]]
            start += part.shape[1]
        assert start == data.shape[1], f"{data.shape[1]} bytes for a block of {start}"

    def _parts(self) -> list[torch.Tensor]:
        return [part for _, layer in sorted((self._layers or {}).items()) for part in (layer.keys, layer.values)]

    def _blocks(self) -> list[torch.Tensor]:
        """The memory of each cache tensor, the padding left out: [blocks, bytes]."""
        return [part[: self._padding_slot].view(self.num_blocks, -1).view(torch.uint8) for part in self._parts()]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer's attention needs in one step.

    layers: the cache by layer; None for the first step of all, which only finds out `shapes`. pages: the same for the
    kernels in Triton, which then take the place of groups. attended: the layers that have attended so far. heads: of
    queries and of values, as the layers have them.
    """

    layers: dict[int, LayerCache] | None
    new_slots: torch.Tensor
    groups: list[Group]
    pages: StepPages | None = None
    attended: set[int] = field(default_factory=set)
    shapes: dict[int, SlotShape] = field(default_factory=dict)
    heads: set[tuple[int, int]] = field(default_factory=set)

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Records that `layer` attends with new keys and values, [G, kv_heads, n, size]."""
        self.attended.add(layer)
        self.shapes[layer] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))


# Not an argument: not every family passes on what it does not know.
_PLAN: Final[ContextVar[AttentionPlan]] = ContextVar("outrider_attention_plan")


@contextlib.contextmanager
def carried_out(plan: AttentionPlan) -> Iterator[None]:
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, T, key size], key and value [1, kv_heads, T, size]."""
    if attention_mask is not None:
        raise ModelFault("it makes attention masks of its own")
    plan = _PLAN.get()
    if module.layer_idx in plan.attended:  # as two halves of the values: one of them would be lost
        raise ModelFault(f"layer {module.layer_idx} attends more than once")
    plan.note(module.layer_idx, key, value)
    plan.heads.add((query.shape[1], value.shape[1]))
    repeats = query.shape[1] // value.shape[1]
    if plan.layers is None:  # the logits of this step are of no use
        return value.repeat_interleave(repeats, dim=1).transpose(1, 2).contiguous(), None
    layer = plan.layers[module.layer_idx]
    packed = query[0].transpose(0, 1)  # [T, heads, key size]
    scale = scaling or packed.shape[2] ** -0.5
    if plan.pages is not None:
        plan.pages.write(layer.keys, layer.values, plan.new_slots, key[0], value[0])
        found = plan.pages.attend(
            packed, layer.keys, layer.values, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return found[None], None
    layer.write(plan.new_slots, key, value)
    attended = packed.new_empty((*packed.shape[:2], value.shape[3]))
    for group in plan.groups:
        queries = packed[group.rows].reshape(group.num_sequences, -1, *packed.shape[1:])
        operands = (
            queries.transpose(1, 2),
            *layer.read(group.slots, query.dtype),
            group.mask_within(sliding_window),
        )
        if softcap is None and s_aux is None:
            result = torch.nn.functional.scaled_dot_product_attention(*operands, scale=scaling, enable_gqa=True)
        else:
            result = _plain_attention(*operands, scale, softcap, s_aux)
        attended[group.rows] = result.transpose(1, 2).flatten(0, 1)
    return attended[None], None


def _plain_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention that fused kernels lack: [G, heads, n, value size].

    softcap: caps the logits, softcap * tanh(logits / softcap). sinks: [heads], one more logit a row, which takes its
    share of the weights and has no value.
    """
    repeats = queries.shape[1] // keys.shape[1]
    logits = (queries @ keys.repeat_interleave(repeats, dim=1).transpose(2, 3)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return weights @ values.repeat_interleave(repeats, dim=1)


class GroupCache(transformers.Cache):  # type: ignore[misc]  # transformers has no types
    """transformers' cache over the slots of one group, for attention that does not go through the interface."""

    def __init__(self, plan: AttentionPlan, group: Group, new_slots: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._plan = plan
        self._group = group
        self._new_slots = new_slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values, [G, kv_heads, n, size]; returns those of the whole contexts."""
        if key_states.shape[2] != self._group.positions.shape[1]:
            raise ModelFault("it adds tokens of its own")
        self._plan.note(layer_idx, key_states, value_states)
        if self._plan.layers is None:
            return key_states, value_states
        layer = self._plan.layers[layer_idx]
        layer.write(self._new_slots, key_states, value_states)
        return layer.read(self._group.slots, key_states.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest context before the step; positions and masks are given, so nothing else depends on it."""
        return int(self._group.slots.shape[1] - self._group.positions.shape[1])
