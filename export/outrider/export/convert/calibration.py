"""Quantizes weights and activations to INT8 ("w8a8"), calibrated on text that runs through the model as a draft's does.

Measured on the reference draft, against FP32 on real code (mean KL in nats; weights alone 0.0005):

* Much text helps: 144 tokens give 0.042, 512 give 0.006, 4,096 give 0.004; more changes nothing.
* Any text that the model could write will do. Text that it samples itself from as many first tokens is as good as real
  text (0.0036 each), so a caller needs none, and held-out texts are not used here.
* Ranges must cover all tokens. nncf's default takes the mean of each feed's extremes, which are small in a cached step
  of few tokens: with steps of 1 and 7 tokens 0.026. Extremes over everything do not depend on how text is cut.

The stateful model itself is quantized: nncf resets the cache only where a feed asks for it, so that cached steps see
the prompt. Ranges are measured in floating point, so the result may differ in its last bits between machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.convert.openvino_ir import IR_NAME, save_ir
from outrider.export.quiet import quiet_upstream
from outrider.models.picks.sampling import SamplingParams, pick

NUM_TEXTS: Final = 32
TEXT_TOKENS: Final = 128
_SMOOTH_QUANT_ALPHA: Final = 0.5
"""How much of the activations' spread moves into the weights. 0.15: KL 0.007, 0.5 to 0.95: 0.003 to 0.004."""


def quantize_fully(stateful_ir_dir: Path, destination: Path, feeds: Sequence[Sequence[int]], name: str) -> None:
    """Writes the FP32 IR of `stateful_ir_dir` to `destination` with INT8 weights and activations.

    feeds: texts as token ids, of any length and number; the model writes what is missing to NUM_TEXTS of TEXT_TOKENS
    each. name: of the model, for messages. The result is stateful and has the source's inputs; the same input gives the
    same files on the same machine.
    Raises ExportError when nncf cannot quantize the model, RuntimeUnavailable when a package is missing.
    """
    with quiet_upstream(f"calibrating {name}"):
        import nncf
        import openvino
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet

        core = openvino.Core()
        model = core.read_model(stateful_ir_dir / f"{IR_NAME}.xml")
        items = [item for text in complete_texts(core, model, feeds) for item in _items(model, text)]
        quantized = nncf.quantize(
            model,
            nncf.Dataset(items),
            preset=nncf.QuantizationPreset.MIXED,
            target_device=nncf.TargetDevice.NPU,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(items),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=_SMOOTH_QUANT_ALPHA),
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
            ),
        )
        save_ir(quantized, destination)


def complete_texts(core: Any, model: Any, feeds: Sequence[Sequence[int]]) -> list[list[int]]:
    """NUM_TEXTS texts of TEXT_TOKENS tokens: the feeds' beginnings, then single tokens spread over the vocabulary, each
    continued by the model's own samples at temperature 1. Longer feeds are cut into several; the same in, the same out.

    core, model: OpenVINO's; the model is a stateful decoder with a dynamic batch.
    """
    from_feeds = [list(feed[i : i + TEXT_TOKENS]) for feed in feeds for i in range(0, len(feed), TEXT_TOKENS)]
    texts = from_feeds[:NUM_TEXTS]
    vocab_size = model.output("logits").get_partial_shape()[-1].get_length()
    num_missing = NUM_TEXTS - len(texts)
    texts += [[(2 * i + 1) * vocab_size // (2 * num_missing)] for i in range(num_missing)]
    if all(len(text) == TEXT_TOKENS for text in texts):
        return texts
    properties = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": "NO"}
    request = core.compile_model(model, "CPU", properties).create_infer_request()
    for position in range(TEXT_TOKENS - 1):
        # All texts at once, one token each: read from where a text is given, else sampled.
        column = np.array([[text[position]] for text in texts], np.int64)
        request.start_async(_inputs(model, column, position))
        request.wait()  # `infer` hides that memory was short, as in `run_request`
        logits: NDArray[np.float32] = request.get_tensor("logits").data[:, -1]
        for seed, (text, row) in enumerate(zip(texts, logits, strict=True)):
            if len(text) == position + 1:
                text.append(pick(row, SamplingParams(temperature=1.0, seed=seed), position + 1))
    return texts


def _items(model: Any, text: Sequence[int]) -> list[dict[str, Any]]:
    """Two feeds: the first half as a prompt into an empty cache, the second as a step on it."""
    from nncf.definitions import NNCF_DATASET_RESET_STATE_KEY

    half = len(text) // 2
    prompt = _inputs(model, np.array([text[:half]], np.int64), 0)
    step = _inputs(model, np.array([text[half:]], np.int64), half)
    return [{**prompt, NNCF_DATASET_RESET_STATE_KEY: True}, {**step, NNCF_DATASET_RESET_STATE_KEY: False}]


def _inputs(model: Any, tokens: NDArray[np.int64], past: int) -> dict[str, Any]:
    """The stateful model's inputs for `tokens` [batch, new] after `past` others in each sequence."""
    batch, num_new = tokens.shape
    positions = np.arange(past, past + num_new, dtype=np.int64)
    known: dict[str, NDArray[Any]] = {
        "input_ids": tokens,
        "attention_mask": np.ones((batch, past + num_new), np.int64),
        "position_ids": np.tile(positions, (batch, 1)),
        "beam_idx": np.arange(batch, dtype=np.int32),
    }
    names = {name for port in model.inputs for name in port.get_names()}
    return {name: value for name, value in known.items() if name in names}  # some families have no position_ids
