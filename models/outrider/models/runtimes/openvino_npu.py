"""Runs a `SequenceRuntime` with branches on an NPU's static graphs, or on these graphs on the CPU (emulation).

A pass of an NPU takes nearly as long for one token as for sixteen. So there are two graphs (`static_graph`): one takes
`step_len` tokens, the next nodes of a tree or a piece of a text, the other a piece of a prompt. Both read keys and
values from the same slots, which are kept here. A slot belongs to one token of the text or of a branch, as
`branch_blocks` decides with blocks of one token; what a token attends is said by its mask. So a fork copies nothing, a
rollback and a commit move nothing.

Knows nothing of weights (INT8, full INT8 and FP32 all run) or of compiling: see `npu_compile`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import ModelLimits, OneSequence, RuntimeOptions, longest_sequence, telling_of_memory
from outrider.models.runtimes.branch_blocks import BranchBlocks
from outrider.models.runtimes.npu_compile import compile_for_npu, num_slots
from outrider.models.runtimes.openvino_graph import find_ir, run_request, shared_tensor
from outrider.models.runtimes.static_graph import MASK, MASKED, PAST, input_name

_PROMPT_STEPS: Final = 3.0
"""Cached steps that take as long as a prompt's pass, until both were measured."""


class _Token(NamedTuple):
    """A token to run. path: the slots of all positions up to its own, int [position + 1]."""

    token: int
    path: NDArray[np.integer]


class _Graph:
    """A compiled static graph with the memory that its request reads, which the request does not keep alive.

    windows: of its masks, as `make_static` has them. fastest_s: of its passes, 0 before the first.
    caches: OpenVINO's tensors, shared by all graphs of a model; this request's own if None. On an NPU these should be
    memory that it reads itself, so that nothing is copied for a pass (not run on hardware).
    """

    def __init__(self, compiled: Any, caches: dict[str, Any] | None) -> None:
        shapes = {input_name(port): list(port.shape) for port in compiled.inputs}
        self.request: Any = compiled.create_infer_request()
        self.num_new: int = shapes["input_ids"][1]
        self.fastest_s = 0.0
        self.has_one_row = "logit_rows" in shapes
        self._ids, self._positions = np.zeros((1, self.num_new), np.int64), np.zeros((1, self.num_new), np.int64)
        self._row = np.zeros(1, np.int64)
        masks = {name: np.full(shape, MASKED, np.float32) for name, shape in shapes.items() if name.startswith(MASK)}
        self._masks = {int(name.removeprefix(MASK)): mask[0, 0] for name, mask in masks.items()}
        self.windows = tuple(sorted(self._masks))
        self.num_slots = next(iter(self._masks.values())).shape[1] - self.num_new
        self._columns = np.arange(self.num_slots)
        self._bound = {"input_ids": self._ids, "position_ids": self._positions, **masks}
        if self.has_one_row:
            self._bound["logit_rows"] = self._row
        for name, array in self._bound.items():
            self.request.set_tensor(name, shared_tensor(array))
        self.caches = caches or {name: self.request.get_tensor(name) for name in shapes if name.startswith(PAST)}
        self._moves: list[tuple[NDArray[np.float16], NDArray[np.float16]]] = []
        for name, tensor in self.caches.items():
            if caches is None:
                tensor.data[:] = 0  # hidden or not, what is no number would be seen
            else:
                self.request.set_tensor(name, tensor)
            old, new = tensor.data, self.request.get_tensor(name.replace(PAST, "present.", 1)).data
            axis = next(axis for axis in range(old.ndim) if old.shape[axis] != new.shape[axis])
            self._moves.append((np.moveaxis(old, axis, 0), np.moveaxis(new, axis, 0)))

    def run(self, tokens: Sequence[_Token]) -> NDArray[np.float32]:
        """Runs at most `num_new` tokens, and keeps their keys and values in their slots.

        Returns the logits after each, [len(tokens), vocabulary], or after the last alone; reused by the next call.
        """
        count = len(tokens)
        slots = [int(each.path[-1]) for each in tokens]
        self._columns[slots] = range(self.num_slots, self.num_slots + count)
        self._ids[:], self._positions[:] = 0, 0
        self._ids[0, :count] = [each.token for each in tokens]
        self._positions[0, :count] = [len(each.path) - 1 for each in tokens]
        self._row[0] = count - 1
        for window, mask in self._masks.items():
            mask[:] = MASKED
            for row, each in zip(mask, tokens, strict=False):
                row[self._columns[each.path[-window:]]] = 0.0
            rest = np.arange(count, self.num_new)
            mask[rest, self.num_slots + rest] = 0.0  # a row that attends nothing is no number
        self._columns[slots] = slots
        before = time.perf_counter()
        run_request(self.request)
        took_s = time.perf_counter() - before
        self.fastest_s = min(self.fastest_s or took_s, took_s)
        for cache, new in self._moves:
            # A hidden slot still counts times 0: what is no number would make others none, for good.
            cache[slots] = np.nan_to_num(new[:count], nan=0.0, posinf=0.0, neginf=0.0)
        logits: NDArray[np.float32] = self.request.get_tensor("logits").data[0]
        return logits[:count]

    def close(self) -> None:
        """Releases the graph and its memory."""
        self.request, self.caches, self._moves, self._masks, self._bound = None, {}, [], {}, {}


class OpenVinoNpuRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens, and its branches, for the lengths of
    `options.static_shapes`.

    provider: the device that runs the model, in words. max_branches: nodes of a pass.
    """

    full_advice = "export the draft with longer static shapes"

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Compiles the stateful IR at `path` (directory or .xml), or takes it from `options.cache_dir`.

        The first time takes seconds on a CPU and minutes on an NPU.
        Raises BundleError when the files are missing or are not a decoder that the graphs can be made of, ConfigError
        for an option out of range, RuntimeUnavailable when there is no NPU and `options.emulate_npu` is off.
        """
        shapes = options.static_shapes
        if shapes is None:
            raise ConfigError("an NPU runs static shapes only; give static_shapes from the bundle's manifest")
        xml = find_ir(path)
        longest = min(longest_sequence(xml.parent, options), shapes.max_positions)
        step, *prompts = compile_for_npu(xml, shapes, options)
        vocab_size = step.output("logits").partial_shape[-1].get_length()
        super().__init__(ModelLimits(vocab_size, longest))
        self.provider = "NPU path emulated on the CPU" if options.emulate_npu else "NPU"
        with telling_of_memory(longest):
            self._step = _Graph(step, None)
            self._prompt = _Graph(prompts[0], self._step.caches) if prompts else None
        self.max_branches = self._step.num_new
        self._blocks = BranchBlocks(num_slots(shapes), 1, longest, copies=True, joins=True)

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        row: NDArray[np.float32] = self._append(tokens, 1)[-1]
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        return self._append(tokens, len(tokens))

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on, and all branches if that shortens the sequence."""
        super().truncate(length)
        self._blocks.truncate(length)

    def _append(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self._check_new(tokens)
        start, end = self._length, self._length + len(tokens)
        first = start + self._blocks.extend(tokens, num_rows)
        new = [_Token(self._blocks.text[place], self._blocks.table[: place + 1]) for place in range(first, end)]
        try:
            rows = self._run(new, range(len(new) - num_rows, len(new)))
        except BaseException:
            self._blocks.truncate(start)
            raise
        self._length = end
        return rows

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch of the sequence, which stays as it is: [B, vocab_size] float32.

        The array is reused by the next call. Raises ConfigError when a branch would be longer than
        `limits.max_positions`.
        """
        assert 0 < len(branches) <= self.max_branches, f"{len(branches)} branches"
        for branch in branches:
            self._check_new(branch)
        logits: NDArray[np.float32] | None = None
        waiting = dict(enumerate(branches))  # by the answer's rows
        try:
            while waiting:
                self._blocks.next_round()
                planned = {row: run for row, branch in waiting.items() if (run := self._blocks.plan(branch))}
                new, last = list[_Token](), list[int]()
                for run in planned.values():
                    path = np.array(run.blocks)
                    new += [_Token(token, path[: run.past + at + 1]) for at, token in enumerate(run.tokens)]
                    last.append(len(new) - 1)
                found = self._run(new, last)
                if len(planned) == len(branches):
                    return found
                if logits is None:
                    logits = np.empty((len(branches), self.limits.vocab_size), np.float32)
                logits[list(planned)] = found
                waiting = {row: branch for row, branch in waiting.items() if row not in planned}
        except BaseException:
            self._blocks.forget_branches()
            raise
        assert logits is not None
        return logits

    def _run(self, tokens: Sequence[_Token], rows: Sequence[int]) -> NDArray[np.float32]:
        """Runs tokens in their order; returns the logits after those numbered `rows`, which ascend."""
        found: list[NDArray[np.float32]] = []
        begin = 0
        while begin < len(tokens):
            graph = self._graph(len(tokens) - begin, rows[0] - begin)
            end = min(begin + graph.num_new, len(tokens))
            logits = graph.run(tokens[begin:end])
            wanted = [row - begin for row in rows if begin <= row < end]
            if graph.has_one_row:
                wanted = [0] * len(wanted)
            if len(wanted) == len(rows):
                whole = wanted == list(range(len(wanted)))
                return logits[: len(wanted)] if whole else logits[wanted]
            if wanted:
                found.append(logits[wanted])
            begin = end
        return np.concatenate(found)

    def _graph(self, num_left: int, first_row: int) -> _Graph:
        """The faster graph for what is left. A prompt's gives the logits after its last token only. first_row: the
        first token whose logits are wanted.
        """
        step, prompt = self._step, self._prompt
        if prompt is None or first_row < min(num_left, prompt.num_new) - 1:
            return step
        is_measured = step.fastest_s and prompt.fastest_s
        ratio = prompt.fastest_s / step.fastest_s if is_measured else _PROMPT_STEPS
        return prompt if -(-min(num_left, prompt.num_new) // step.num_new) > ratio else step

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        for graph in (self._step, self._prompt):
            if graph is not None:
                graph.close()
