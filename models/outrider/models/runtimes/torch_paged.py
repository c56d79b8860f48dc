"""Runs a `BatchRuntime` on torch and transformers: the plain twin that tests compare with on CPU, the runtime for CUDA.

All new tokens of a step go through the model as one packed row, so no layer computes padding. Only attention separates
sequences: it writes the new keys and values to their slots, then attends. On CUDA that is a kernel in Triton
(`triton_attention`), small steps are recorded as CUDA graphs (`torch_graphs`), and with `is_batch_invariant` every
row's sums have one order (`triton_rows`). On the CPU, sequences with the same number of new tokens attend together
through SDPA, their contexts padded to the longest: padding reads a slot that stays zero, for a masked key or value that
is not finite would still reach the sum (0 * NaN is NaN). Layers may attend a sliding window, cap their logits (Gemma
2), have sinks (GPT-OSS), or keys and values of different sizes (multi-head latent attention).

This needs transformers' attention interface, which most families use. A family with attention of its own (GPT-J,
Falcon, Nemotron) runs each group of sequences as a batch, with transformers' `Cache` over the same slots. Models that
fit neither (recurrent layers; Bloom and GPT-Neo, which make masks by themselves) are detected when they are loaded, and
refused.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError, ConfigError, ModelFault
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import PickedRow
from outrider.models.processors.step_choices import StepChoices
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes.base import Ask, Beside, ModelLimits, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.bitwise_check import blocks_needed, other_rows
from outrider.models.runtimes.ragged import RaggedStep, begins, lay_out
from outrider.models.runtimes.torch_cache import (
    BLOCK_SIZE,
    AttentionPlan,
    Group,
    GroupCache,
    TorchCache,
    attend,
    carried_out,
    has_kernels,
)
from outrider.models.runtimes.torch_int8 import quantize
from outrider.models.runtimes.torch_joined import join
from outrider.models.runtimes.torch_loading import (
    INT8,
    device_of,
    dtype_of,
    load_causal_lm,
    max_positions_of,
    may_slide,
)

if TYPE_CHECKING:
    from outrider.models.runtimes.torch_graphs import KernelSteps, StepInputs

_PROBE_TOKENS: Final = 3
_ATTENTION: Final = "outrider_paged"


class _Unfit(Exception):
    """A model that this runtime cannot run in the way tried."""


class TorchPagedRuntime(TorchCache):
    """Ragged batches, tree masks included, of a Hugging Face directory (safetensors, no remote code)."""

    _model: Any

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the model; `options.properties["dtype"]` is "f32", "bf16", "f16", or "i8" for linear layers of INT8 in
        a model of bf16; by default f32 on CPU, else bf16.

        Raises BundleError when transformers cannot load the directory or this runtime does not support its attention,
        ConfigError for an option out of range, RuntimeUnavailable when the device is missing.
        """
        self._path = path
        self._device = device_of(options.device)
        name = options.properties.get("dtype", "f32" if self._device.type == "cpu" else "bf16")
        dtype, self._is_int8 = dtype_of(name), name == INT8
        if options.num_threads and self._device.type == "cpu":
            torch.set_num_threads(options.num_threads)
        self.faults_last = self._device.type == "cuda"  # an error in a kernel stays for the process's life
        super().__init__(self._device)
        self._kernels: KernelSteps | None = None
        self._until_closed = ExitStack()
        self._is_bitwise = has_kernels(self._device) and options.is_batch_invariant is True
        if self._is_bitwise:
            from outrider.models.runtimes.triton_rows import row_by_row

            self._until_closed.enter_context(row_by_row(self._device.type.upper()))
        plan = self._load(dtype)
        config: Any = self._model.config.get_text_config()
        self._allocate(plan.shapes, dtype, options.kv_cache_bytes)
        self.why_no_trees: str | None = None
        if not self._is_packed:
            # Masks are right with sliding windows too; but attention of a family's own may count slots, as ALiBi does.
            why = f"the model in {path} has attention of its own, which may go by slots; use --tree line"
            self.why_no_trees = why
        self.limits = ModelLimits(config.vocab_size, max_positions_of(self._model.config, options))
        if has_kernels(self._device) and self._is_packed:
            self._kernels = self._with_kernels(plan)
        if self._is_bitwise:
            self._require_bitwise()
        if self._kernels is not None:  # compiles, also what picks: nobody waits yet
            asked = [AskedRows(SamplingParams(temperature=1.0, top_p=top_p), [0]) for top_p in (1.0, 0.5)]
            self.forward_picks([SequenceSlice([0, 0], 0, [0], 2)], lambda: asked, lambda is_over: None)

    @property
    def description(self) -> str:
        """Device, kernels, graphs, and memory of the cache."""
        ways = [f"torch on {self._device}", *["linear layers in INT8"] * self._is_int8]
        if self._kernels is None:
            ways.append("attention through SDPA" if self._is_packed else "attention of the model's own")
        else:
            ways.append("attention in Triton")
            if self._kernels.most_recorded:
                fused = " of fused kernels" if self._kernels.is_fused else ""
                ways.append(f"steps of up to {self._kernels.most_recorded} tokens as CUDA graphs{fused}")
            if self._is_bitwise:
                ways.append("each row's sums in one order")
        return f"{', '.join(ways)}; {self.num_blocks * self.block_bytes / 1e6:.0f} MB for keys and values"

    def _with_kernels(self, plan: AttentionPlan) -> KernelSteps:
        from outrider.models.runtimes.torch_graphs import KernelSteps  # Triton: where there is a GPU

        return KernelSteps(
            self._pass,
            self._device,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_blocks=-(-self.limits.max_positions // BLOCK_SIZE),
            heads=plan.heads,
            fused=None if self._is_bitwise or self._device.type != "cuda" else self._fused(),
        )

    def _fused(self) -> Callable[[StepInputs], torch.Tensor]:
        """The pass by torch's compiler, which joins the small operations between products and attention. What it makes
        is kept in the user's cache folder, not in one that others may write to.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "torch"))
        return partial(self._pass, model=torch.compile(self._model.forward, dynamic=True))

    def _require_bitwise(self) -> None:
        """Raises ConfigError for a model whose rows depend on what else is in a step."""
        why: str | None = "has attention of its own, which no step leaves bitwise equal"
        if self._is_packed:
            from outrider.models.runtimes.triton_attention import SPLIT, TILE

            # Past the first part of a context; on Triton's interpreter, past the first tile of keys.
            wanted = 1 + (SPLIT if self._device.type == "cuda" else TILE)
            before = min(wanted, self.limits.max_positions // 2)
            company = None
            if self.num_blocks < blocks_needed(before, BLOCK_SIZE):
                why = f"has {self.num_blocks} blocks of keys and values, too few to try it: raise --kv-cache-mb"
            else:
                has_trees = self.why_no_trees is None
                company = other_rows(
                    self.forward, self.limits.vocab_size, BLOCK_SIZE, before=before, has_trees=has_trees
                )
                why = company and f"gives other logits {company} than token by token, so its texts would differ"
        if why is not None:
            self.close()
            raise ConfigError(f"the model in {self._path} {why}; leave out --exact bitwise")

    def _load(self, dtype: torch.dtype) -> AttentionPlan:
        """Loads the model so that every layer attends over our cache, through the interface or through `Cache`.

        Returns what the layers noted. Raises BundleError if neither way reaches every layer.
        """
        # The compiler of `_fused` leaves attention as it is.
        plain = torch.compiler.disable(attend) if has_kernels(self._device) else attend  # type: ignore[no-untyped-call]
        transformers.AttentionInterface.register(_ATTENTION, plain)
        self._is_packed = True
        try:
            return self._try_load(dtype, _ATTENTION)
        except _Unfit as error:
            through_interface = str(error)  # the error itself holds frames, and these the model
        self._is_packed, self._model = False, None  # before another is loaded: there may be no room for two
        gc.collect()  # a model has cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            return self._try_load(dtype, "eager")
        except _Unfit as through_cache:
            why = f"{through_interface}; with its own attention: {through_cache}"
            raise BundleError(_unfit(self._path, why)) from through_cache

    def _try_load(self, dtype: torch.dtype, attention: str) -> AttentionPlan:
        """Loads the model and runs some tokens, which finds out which layers attend, and with what; else `_Unfit`."""
        try:
            model = load_causal_lm(self._path, dtype, attention)
        except KeyError as error:  # some families look the name up in a table of their own
            raise _Unfit("it has its own table of attention functions") from error
        if self._is_int8:
            quantize(model, self._device, in_order=self._is_bitwise)
        self._model = model.to(self._device).eval()
        if has_kernels(self._device):
            join(self._model)
        self._arguments = set(inspect.signature(model.forward).parameters)
        config: Any = model.config.get_text_config()
        if not self._is_packed and may_slide(config):
            raise _Unfit("it may slide, which our masks would replace")
        tokens = [0] * _PROBE_TOKENS
        first = lay_out(
            [SequenceSlice(tokens, 0, [0], 1)],
            vocab_size=1,
            max_positions=_PROBE_TOKENS,
            block_size=_PROBE_TOKENS,
            num_blocks=1,
        )
        try:
            _, plan = self._run(first)
        except ConfigError:
            raise
        except ModelFault as error:
            raise _Unfit(str(error)) from error
        except Exception as error:  # an architecture may raise anything for unknown arguments
            raise _Unfit(f"{type(error).__name__}: {error}") from error
        if len(plan.attended) != config.num_hidden_layers:
            raise _Unfit(f"{len(plan.attended)} of {config.num_hidden_layers} layers attend through it")
        return plan

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32.

        Blocking, one thread at a time. Writes the new tokens' slots and nothing else.
        """
        logits: NDArray[np.float32] = self._logits(batch).cpu().numpy()
        return logits

    @torch.inference_mode()
    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[PickedRow]:
        """As `PickingRuntime.forward_picks`."""
        logits = self._logits(batch)
        choices = StepChoices(ask(), self.limits.vocab_size, self._device)  # on CUDA the model still runs
        if not len(logits):
            return []
        while_it_runs = partial(_beside, beside, self._device) if self._device.type == "cuda" else None
        return choices.found(logits.contiguous(), while_it_runs)

    def _logits(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        step = lay_out(
            batch,
            vocab_size=self.limits.vocab_size,
            max_positions=self.limits.max_positions,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
        )
        if self._kernels is not None:
            return self._kernels.logits(step)
        logits, plan = self._run(step)
        self._require_all(plan)
        return logits

    def _require_all(self, plan: AttentionPlan) -> None:
        """Raises ModelFault where a layer did not attend over the cache."""
        assert self._layers is not None
        if plan.attended != set(self._layers):
            raise ModelFault(
                _unfit(self._path, f"{len(plan.attended)} of {len(self._layers)} layers attend through it")
            )

    @torch.inference_mode()
    def _run(self, step: RaggedStep) -> tuple[torch.Tensor, AttentionPlan]:
        """The logits of the step's rows, [R, vocab_size] float32, and what the layers noted."""
        num_new = np.diff(step.subsequence_begins)
        slots = self._tensor(step.slots(BLOCK_SIZE, step.past_lens, num_new))
        plan = AttentionPlan(self._layers, slots, self._groups(step, num_new))
        if not self._is_packed:
            return self._run_grouped(step, plan), plan
        rows, ids, positions = map(self._tensor, (step.logit_rows, step.input_ids, step.position_ids))
        return self._run_packed(plan, rows, ids, positions), plan

    def _run_packed(
        self,
        plan: AttentionPlan,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        model: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        with carried_out(plan):
            return self._forward(rows, model, input_ids=input_ids[None], position_ids=position_ids[None])

    def _pass(self, inputs: StepInputs, model: Callable[..., Any] | None = None) -> torch.Tensor:
        plan = AttentionPlan(self._layers, inputs.new_slots, [], inputs.pages)
        logits = self._run_packed(plan, inputs.rows, inputs.input_ids, inputs.position_ids, model)
        self._require_all(plan)
        return logits

    def _run_grouped(self, step: RaggedStep, plan: AttentionPlan) -> torch.Tensor:
        """Runs each group as a batch of its own."""
        pieces, places = [], []
        wanted = np.zeros(len(step.input_ids), np.bool_)
        wanted[step.logit_rows] = True
        for group in plan.groups:
            rows = group.rows.cpu().numpy()
            chosen = np.flatnonzero(wanted[rows])
            mask = torch.zeros(group.mask.shape, dtype=self._model.dtype, device=self._device)
            pieces.append(
                self._forward(
                    self._tensor(chosen),
                    input_ids=step.input_ids[rows].reshape(group.num_sequences, -1),
                    position_ids=step.position_ids[rows].reshape(group.num_sequences, -1),
                    attention_mask=mask.masked_fill(~group.mask, torch.finfo(mask.dtype).min),
                    past_key_values=GroupCache(plan, group, plan.new_slots[group.rows]),
                    use_cache=True,
                )
            )
            places.append(rows[chosen])
        order = np.argsort(np.concatenate(places), kind="stable")  # the rows of a step are in the order of its tokens
        return torch.cat(pieces)[self._tensor(order)]

    def _forward(self, rows: torch.Tensor, model: Callable[..., Any] | None = None, **arguments: Any) -> torch.Tensor:
        """The logits of `rows` of the tokens, all sequences one after the other: [R, vocab_size]. model: to be run."""
        given = {
            name: self._tensor(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
        }
        given.setdefault("use_cache", False)
        if given["input_ids"].shape[0] == 1 and "logits_to_keep" in self._arguments:
            given["logits_to_keep"] = rows
        logits: torch.Tensor = (model or self._model)(**given).logits
        flat = logits.flatten(0, 1)
        return (flat if "logits_to_keep" in given else flat[rows]).float()

    def _groups(self, step: RaggedStep, num_new: NDArray[np.integer]) -> list[Group]:
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
                Group(
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
        self._model = self._kernels = None
        self._layers = {}
        self._until_closed.close()


def _unfit(path: Path, why: str) -> str:
    return f"the model in {path} does not use transformers' attention interface as the torch runtime needs it: {why}"


def _beside(act: Beside, device: torch.device) -> None:
    """Does something until CUDA has carried out all of the present orders."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    act(done.query)
