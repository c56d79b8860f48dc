"""From a torch model to OpenVINO IR, FP32 or with INT8 weights; the same input gives the same bytes."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream

IR_NAME: Final = "openvino_model"
# Names that OpenVINO made up, numbered by a counter of the process; those of modules are left as they are.
_MADE_UP: Final = re.compile(r"[A-Za-z]+_\d+")


def convert_to_ir(model: Any, directory: Path, name: str) -> None:
    """Writes the stateful FP32 IR of a transformers model to `directory`. The model may be spent afterwards."""
    with quiet_upstream(f"converting {name} to OpenVINO"):
        from optimum.exporters.openvino import export_from_model
        from optimum.intel import OVConfig

        export_from_model(
            model=model,
            output=directory,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp32"),
            stateful=True,
        )
        for path in directory.iterdir():
            if path.stem != IR_NAME:
                path.unlink()  # configuration and tokenizer are taken from the source, unaltered


def finish_ir(directory: Path, destination: Path, name: str, *, is_int8: bool) -> None:
    """Moves the IR of `directory` to `destination`, its weights quantized if asked for, its names made
    stable.
    """
    with quiet_upstream(f"quantizing {name}" if is_int8 else f"writing {name}"):
        import openvino

        model = openvino.Core().read_model(directory / f"{IR_NAME}.xml")
        if is_int8:
            import nncf

            # Asymmetric, one scale a row of each matrix: nncf's data-free default.
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        model.set_friendly_name(IR_NAME)
        for index, node in enumerate(model.get_ordered_ops()):
            if _MADE_UP.match(node.get_friendly_name()):
                node.set_friendly_name(f"{node.get_type_name()}_{index}")
        openvino.save_model(model, destination / f"{IR_NAME}.xml", compress_to_fp16=False)
        del model
        gc.collect()  # lets go of the mapped file, which Windows would not remove otherwise
