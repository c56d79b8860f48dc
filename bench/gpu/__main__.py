"""Measures the product on a bare CUDA machine, in five parts of at most five minutes; each writes JSON.

  1  exactness   the torch sampler against the numpy twin, texts against transformers' generate, differences over shapes
  2  steps       steps/s of an 8B shape and of the widened target against the floor; where a step's time goes
  3  round trips `bench.never_slower` with the target on the GPU and the draft in onnxruntime on cores
  4  load        `bench.load` with stream, verify, auto, JSON, logprobs; `bench.capacity` against the draft beside
  5  bitwise     100,000 tokens of `--exact bitwise`: the same alone, in a large batch and in small ones with trees

The machine needs Python 3.12, torch, transformers, onnxruntime and the server's parts, and no package index: the first
lines say what is there, what is missing, and the commands that make and unpack a folder of wheels (8 MB). The draft of
parts 3 and 4 is carried, too, because onnxruntime-genai, which makes it, is not there.

    python -m bench.gpu --out DIR [--part 1 2 ...] [--draft BUNDLE]     # on the machine; the checkout is not installed
    python -m bench.gpu --make-draft BUNDLE                             # elsewhere, to carry it along
    python -m bench.gpu --needs                                         # the list alone
    python -m bench.gpu --small --device cpu --out DIR                  # that it runs, on any machine
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.needs import MAKES_DRAFT, download, is_enough, look, report

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--part": {"type": int, "nargs": "+", "choices": (1, 2, 3, 4, 5), "default": [1, 2, 3, 4, 5]},
    "--out": {"type": Path, "help": "directory of the JSON"},
    "--made": {"type": Path, "help": "keeps exported bundles for a later call; default: not kept"},
    "--draft": {"type": Path, "help": "a draft bundle for onnxruntime; default: made there"},
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "--limit-s": {"type": float, "default": 300.0, "help": "of each part; what does not fit is left out, named"},
    "--small": {"action": "store_true", "help": "the smallest form"},
    "--needs": {"action": "store_true", "help": "say what is there and what is missing"},
    "--wheels": {"action": "store_true", "help": "print the command that makes the folder of all wheels"},
    "--make-draft": {"type": Path, "metavar": "BUNDLE", "help": "export the draft there, and do nothing else"},
}


def main(given: Sequence[str] | None = None) -> int:
    """The command. Exits 2 where a package is missing, 1 where a part missed a bound or a text differs unexplained."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, arguments in OPTIONS.items():
        cli.add_argument(name, **arguments)
    options = cli.parse_args(given)
    if options.wheels:
        print(download())
        return 0
    found = look()
    print(report(found), flush=True)
    if options.needs or not is_enough(found):
        return 0 if is_enough(found) else 2

    from bench.gpu.place import SMALL, Run, Sizes, make_draft

    if options.make_draft is not None:
        make_draft(options.make_draft)
        return 0
    if options.out is None:
        cli.error("--out is missing: the directory of the JSON")
    if {3, 4} & set(options.part) and options.draft is None and importlib.util.find_spec(MAKES_DRAFT) is None:
        cli.error("parts 3 and 4 need --draft BUNDLE; make it elsewhere: python -m bench.gpu --make-draft BUNDLE")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        cli.error(f"torch {torch.__version__} sees no CUDA device; --small --device cpu runs the smallest form")
    parts = {1: "exact", 2: "steps", 3: "round_trips", 4: "load", 5: "bitwise"}
    options.out.mkdir(parents=True, exist_ok=True)
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        made = options.made or Path(scratch)
        made.mkdir(parents=True, exist_ok=True)
        for number in options.part:
            sizes = SMALL if options.small else Sizes()
            run = Run(number, options.out, made, options.device, sizes, options.limit_s, options.draft)
            part = importlib.import_module(f"bench.gpu.{parts[number]}")
            missed += [f"part {number}: {miss}" for miss in part.measure(run)]
            for name in run.left_out:
                print(f"part {number}: left out: {name}", flush=True)
    for miss in missed:
        print(miss, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
