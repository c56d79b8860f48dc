"""Measures the product on a bare CUDA machine, in parts of at most five minutes; each writes JSON. Part 1 are tests.

  1  exactness   `TRITON_INTERPRET=0 python -m pytest tests/test_on_gpu.py`: picks against numpy's, exports, trees
  2  steps       steps/s of an 8B shape and of the widened target against the floor; where a step's time goes
  3  round trips `bench.never_slower` with the target on the GPU and the draft in onnxruntime on cores
  4  load        `bench.load` with stream, verify, auto; `bench.capacity` against the draft beside
  5  bitwise     100,000 tokens of `--exact bitwise`: the same alone, in a large batch and in small ones with trees

bench/README.md says what the machine needs; what of it is missing is named before anything runs. The draft of parts 3
and 4 is carried, too, where onnxruntime-genai, which makes it, is not there.

    python -m bench.gpu --out DIR [--part 2 3 ...] [--draft BUNDLE]     # on the machine; the checkout is not installed
    python -m bench.gpu --make-draft BUNDLE                             # elsewhere, to carry it along
    python -m bench.gpu --small --device cpu --out DIR                  # that it runs, on any machine
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.gpu.needs import missing

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--part": {"type": int, "nargs": "+", "choices": (2, 3, 4, 5), "default": [2, 3, 4, 5]},
    "--out": {"type": Path, "help": "directory of the JSON"},
    "--made": {"type": Path, "help": "keeps exported bundles for a later call; default: not kept"},
    "--draft": {"type": Path, "help": "a draft bundle for onnxruntime; default: made there"},
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "--limit-s": {"type": float, "default": 300.0, "help": "of each part; what does not fit is left out, named"},
    "--small": {"action": "store_true", "help": "the smallest form"},
    "--make-draft": {"type": Path, "metavar": "BUNDLE", "help": "export the draft there, and do nothing else"},
}


def main(given: Sequence[str] | None = None) -> int:
    """The command. Exits 2 where a package is missing, 1 where a part missed a bound or a text differs unexplained."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, arguments in OPTIONS.items():
        cli.add_argument(name, **arguments)
    options = cli.parse_args(given)
    if lacking := missing():
        print("Missing; bench/README.md says how to bring it:", *lacking, sep="\n  ", flush=True)
        return 2

    from bench.gpu.place import SMALL, Run, Sizes, make_draft

    if options.make_draft is not None:
        make_draft(options.make_draft)
        return 0
    if options.out is None:
        cli.error("--out is missing: the directory of the JSON")
    if {3, 4} & set(options.part) and options.draft is None and find_spec("onnxruntime_genai") is None:
        cli.error("parts 3 and 4 need --draft BUNDLE; make it elsewhere: python -m bench.gpu --make-draft BUNDLE")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        cli.error(f"torch {torch.__version__} sees no CUDA device; --small --device cpu runs the smallest form")
    from bench.gpu import benches, steps

    parts = {2: steps.measure, 3: benches.round_trips, 4: benches.sessions, 5: steps.bitwise}
    options.out.mkdir(parents=True, exist_ok=True)
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        made = options.made or Path(scratch)
        made.mkdir(parents=True, exist_ok=True)
        for number in options.part:
            sizes = SMALL if options.small else Sizes()
            run = Run(number, options.out, made, options.device, sizes, options.limit_s, options.draft)
            missed += [f"part {number}: {miss}" for miss in parts[number](run)]
            for name in run.left_out:
                print(f"part {number}: left out: {name}", flush=True)
    for miss in missed:
        print(miss, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
