"""Serves a model with vLLM whose steps take at least a given time: for attacks whose limit is a number of steps.

    python -m bench.paced_vllm MODEL --step-ms 20 [--extra-ms 1] [options of `outrider-cloud serve`]

The interpreter has to have vLLM. vLLM's engine process imports this module, too.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

from bench.report import option, parser

from outrider.cloud.vllm import options
from outrider.cloud.vllm.scheduler import OutriderScheduler

_VARIABLE: Final = "OUTRIDER_BENCH_PACE"


class PacedScheduler(OutriderScheduler):
    """Sleeps until a step has taken its time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_s, self._extra_s = (float(each) / 1e3 for each in os.environ[_VARIABLE].split(","))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Books the tokens of a step, not before it has taken its time."""
        count = scheduler_output.total_num_scheduled_tokens
        if count:
            left_s = self._ordered_s + self._step_s + (count - 1) * self._extra_s - time.monotonic()
            time.sleep(max(0.0, left_s))
        return super().update_from_output(scheduler_output, model_runner_output)


def main() -> None:
    """The command."""
    from outrider.cloud.server.main import main as serve

    cli = parser(__doc__, {"--step-ms": option(0.0), "--extra-ms": option(0.0)})
    pace, arguments = cli.parse_known_args()
    os.environ[_VARIABLE] = f"{pace.step_ms},{pace.extra_ms}"
    options.SCHEDULER = "bench.paced_vllm.PacedScheduler"  # type: ignore[misc]
    sys.argv = ["outrider-cloud", "serve", *arguments]
    serve()


if __name__ == "__main__":
    main()
