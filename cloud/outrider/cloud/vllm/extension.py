"""Extends vLLM's workers: one call after the start puts our samplers into the model runner, and says what it found."""

from __future__ import annotations

import os
from typing import Any

from outrider.cloud.vllm.checks import changed_signatures, missing_attributes
from outrider.cloud.vllm.options import RUNNER_VARIABLE
from outrider.cloud.vllm.parent import end_with_parent
from outrider.cloud.vllm.self_check import row_faults
from outrider.cloud.vllm.worker_choosers import WorkerGrammars
from outrider.models.errors import RuntimeUnavailable, TokenizerError
from outrider.models.faults import log_fault

end_with_parent()  # vLLM imports this module before it loads weights

V1_RUNNER_ATTRIBUTES = (
    "input_batch.num_reqs",
    "input_batch.req_ids",
    "input_batch.num_tokens_no_spec",
    "input_batch.spec_token_ids",
    "discard_request_mask.np",
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
    "req_states.index_to_req_id",
    "speculator.propose",
    "speculative_config.use_eagle",
    "draft_tokens_handler.set_draft_tokens",
    "device",
    "scheduler_config.async_scheduling",
    "kv_block_zeroer",
    "_init_kv_zero_meta",
)
"""What `v2.install` touches of the V2 model runner."""
V2_NGRAM_ATTRIBUTES = ("speculator.drafts",)
"""And where the target has no heads: of the n-gram proposer, which is silenced."""
V1_RUNNER_SIGNATURES = {
    "sampler.forward": "logits sampling_metadata predict_bonus_token logprobs_mode_override",
    "rejection_sampler.forward": "metadata draft_probs logits sampling_metadata",
    "sample_tokens": "grammar_output",
}
V2_RUNNER_SIGNATURES = {
    "update_requests": "scheduler_output",
    "sample_tokens": "grammar_output",
    "speculator.propose": "input_batch ...",
    "draft_tokens_handler.set_draft_tokens": "input_batch draft_tokens",
}
"""What of it is replaced, and what that takes."""
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
        """Replaces the samplers. Returns the runner's class, what is missing of it (nothing is replaced then), and in
        which picks the device differs.
        """
        runner = self.model_runner
        kind = type(runner)
        is_v2 = os.environ.get(RUNNER_VARIABLE) == "1"
        module, attributes, signatures = (
            (V2_RUNNER_MODULE, V2_RUNNER_ATTRIBUTES, V2_RUNNER_SIGNATURES)
            if is_v2
            else (V1_RUNNER_MODULE, V1_RUNNER_ATTRIBUTES, V1_RUNNER_SIGNATURES)
        )
        missing = [] if any(each.__module__ == module for each in kind.__mro__) else [f"the runner of {module}"]
        missing += missing_attributes(runner, attributes)
        if is_v2 and not missing and not runner.speculative_config.use_eagle():
            missing = missing_attributes(runner, V2_NGRAM_ATTRIBUTES)
        missing += [] if missing else changed_signatures(runner, signatures)
        if not missing and runner.scheduler_config.async_scheduling:
            missing = ["synchronous scheduling"]
        found = {"runner": f"{kind.__module__}.{kind.__qualname__}", "missing": missing, "differs": []}
        if missing:
            return found
        config = runner.model_config
        try:
            found["differs"] = row_faults(runner.device, config.get_vocab_size())
        except Exception as error:  # of a kernel that does not compile for this device, say
            log_fault(error)
            found["differs"] = [f"the picks failed on {runner.device} ({error}); the log above has more"]
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
