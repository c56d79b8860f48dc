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
    "use_async_scheduling",
    "_init_kv_zero_meta",
    "_zero_block_ids",
)
"""What the samplers touch of the V1 model runner; none is public."""


V1_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
"""Of the runners' classes; those of other devices are derived from them."""


_SYNCHRONOUS = "synchronous scheduling"


class OutriderExtension:
    """`worker_extension_cls`: vLLM mixes it into its worker class."""

    model_runner: Any
    outrider_grammars: WorkerGrammars

    def _grammars(self) -> WorkerGrammars:
        config = self.model_runner.model_config
        is_judge = getattr(self, "rank", 0) == 0  # vLLM takes tokens and refusals from this one
        self.outrider_grammars = WorkerGrammars(config.model, config.get_vocab_size(), is_judge=is_judge)
        return self.outrider_grammars

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
        found = {"runner": f"{kind.__module__}.{kind.__qualname__}", "missing": list[str]()}
        is_v2 = os.environ.get(RUNNER_VARIABLE) == "1"
        expected = V2_RUNNER_MODULE if is_v2 else V1_RUNNER_MODULE
        missing = [] if any(each.__module__ == expected for each in kind.__mro__) else [f"the runner of {expected}"]
        if is_v2:
            if missing:
                return found | {"missing": missing}
            from outrider.cloud.vllm import v2

            missing = missing_attributes(runner, v2.ATTRIBUTES)
            if not missing and runner.scheduler_config.async_scheduling:
                missing = [_SYNCHRONOUS]
            if not missing:
                v2.install(runner, self._grammars())
                if runner.kv_block_zeroer is None:
                    runner._init_kv_zero_meta()
            return found | {"missing": missing}
        missing += missing_attributes(runner, V1_RUNNER_ATTRIBUTES)
        if missing:
            return found | {"missing": missing}
        if runner.use_async_scheduling:
            return found | {"missing": [_SYNCHRONOUS]}
        from outrider.cloud.vllm.sampler import OutriderSampler, OutriderVerifier, Rows, attach_found

        rows = Rows(runner, self._grammars())
        runner.sampler = OutriderSampler(rows, runner.sampler.logprobs_mode)
        runner.rejection_sampler = OutriderVerifier(rows, runner.sampler, runner.speculative_config, runner.device)
        attach_found(runner, rows)
        # vLLM prepares the zeroing of blocks only for some caches; the scheduler asks for it after a fault.
        if runner.device.type != "cpu" and not hasattr(runner, "_kv_block_zeroer"):
            runner._init_kv_zero_meta()
        return found
