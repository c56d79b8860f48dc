"""Extends vLLM's workers: one call after the start puts our samplers into the model runner, and says what it found."""

from __future__ import annotations

import os
from typing import Any

from outrider.cloud.vllm.checks import missing_attributes
from outrider.cloud.vllm.options import RUNNER_VARIABLE
from outrider.cloud.vllm.parent import end_with_parent
from outrider.cloud.vllm.worker_choosers import WorkerGrammars
from outrider.models.errors import RuntimeUnavailable, TokenizerError

end_with_parent()  # vLLM imports this module before it loads weights

V1_RUNNER_ATTRIBUTES = (
    "input_batch.num_reqs",
    "input_batch.req_ids",
    "input_batch.num_tokens_no_spec",
    "requests",
    "sample_tokens",
    "sampler.logprobs_mode",
    "rejection_sampler",
    "speculative_config",
    "device",
    "scheduler_config.async_scheduling",
    "_init_kv_zero_meta",
    "_zero_block_ids",
)
"""What the samplers touch of the V1 model runner; none is public."""
V2_RUNNER_ATTRIBUTES = (
    "update_requests",
    "sample_tokens",
    "req_states.draft_tokens",
    "req_states.req_id_to_index",
    "speculator.propose",
    "speculator.drafts",
    "scheduler_config.async_scheduling",
    "kv_block_zeroer",
    "_init_kv_zero_meta",
)
"""What `v2.install` touches of the V2 model runner."""
V1_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
"""Of the runners' classes; those of other devices are derived from them."""


class OutriderExtension:
    """`worker_extension_cls`: vLLM mixes it into its worker class."""

    model_runner: Any
    outrider_grammars: WorkerGrammars

    def outrider_compile(self, number: int, grammar: list[Any] | None) -> list[Any] | None:
        """Begins to compile a grammar, with its terms; None until it is done. Then the seconds of the processor that it
        took, what is wrong, "" for nothing, and whose fault it is: "grammar", "tokenizer" or "unavailable".
        """
        try:
            built = self.outrider_grammars.compile(number, grammar)
        except TokenizerError as error:
            return [0.0, str(error), "tokenizer"]
        except RuntimeUnavailable as error:
            return [0.0, str(error), "unavailable"]
        return None if built is None else [built.taken_s, built.fault, "grammar"]

    def outrider_forget(self, numbers: list[int]) -> None:
        """As `WorkerGrammars.forget`."""
        self.outrider_grammars.forget(numbers)

    def outrider_install(self) -> dict[str, Any]:
        """Replaces the samplers. Returns the runner's class and what is not as expected; nothing is replaced then."""
        runner = self.model_runner
        kind = type(runner)
        is_v2 = os.environ.get(RUNNER_VARIABLE) == "1"
        module, attributes = (
            (V2_RUNNER_MODULE, V2_RUNNER_ATTRIBUTES) if is_v2 else (V1_RUNNER_MODULE, V1_RUNNER_ATTRIBUTES)
        )
        missing = [] if any(each.__module__ == module for each in kind.__mro__) else [f"the runner of {module}"]
        missing += missing_attributes(runner, attributes)
        if not missing and runner.scheduler_config.async_scheduling:
            missing = ["synchronous scheduling"]
        found = {"runner": f"{kind.__module__}.{kind.__qualname__}", "missing": missing}
        if missing:
            return found
        config = runner.model_config
        is_judge = getattr(self, "rank", 0) == 0  # vLLM takes tokens and refusals from this one
        self.outrider_grammars = WorkerGrammars(config.model, config.get_vocab_size(), is_judge=is_judge)
        # vLLM prepares the zeroing of blocks only for some caches; the scheduler asks for it after a fault.
        if is_v2:
            from outrider.cloud.vllm import v2

            v2.install(runner, self.outrider_grammars)
            has_zeroing = runner.kv_block_zeroer is not None
        else:
            from outrider.cloud.vllm import sampler

            sampler.install(runner, self.outrider_grammars)
            has_zeroing = runner.device.type == "cpu" or hasattr(runner, "_kv_block_zeroer")
        if not has_zeroing:
            runner._init_kv_zero_meta()
        return found
