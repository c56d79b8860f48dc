"""Measures what the map of vocabularies costs, for drafts with another tokenizer than the reference target's.

    PYTHONPATH=reference python -m training.other_vocabularies DIR      # trains them
    PYTHONPATH=reference:. python -m bench.other_vocabulary accept DIR
    PYTHONPATH=reference:. python -m bench.other_vocabulary cost

`accept` has the target continue held-out prompts, and compares each draft's picks with the target's: acceptance, as a
share of `own`'s; the target's ids and the text that one of its tokens writes; `unscored`: picks that the map has no
score for, which are lost for that alone; calls of the draft per id of the text; the draft's bits per character on
held-out text, which say what the tokenizer and the training make of it. `bench.never_slower --draft DIR/gpt2/bundle`
measures one in use.

`cost` trains two byte-level BPE of 152,000 and 100,000 ids on the Python files of this environment, and measures the
map: its making, its memory, and its time per node, less the draft's own, on one core: of the first nodes of a text and,
once what is common was seen, of later ones. The draft's logits are normal, of deviation 3, as a language model's are,
and the likeliest token of each row, 18 above their mean, is drawn as often as it comes in the text.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from outrider.edge.modes.assemble import open_draft_model
from outrider.export.check.acceptance import Continuation, continue_prompts, read_along
from outrider.export.check.runner import open_target
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import candidates
from outrider.models.runtimes.base import ModelLimits, SequenceRuntime
from outrider.models.runtimes.mapped_sequence import MappedSequence, mapped
from outrider.models.text.tokenizer import Tokenizer as Outrider
from outrider.models.text.vocabulary_map import VocabularyMap
from outrider.reference import load_prompts
from training.corpus import load_corpus
from training.data import encode_files
from training.other_vocabularies import KINDS
from training.pretrain import quick_loss
from training.vocabulary import END_OF_TEXT, PIECES, save_tokenizer

MAX_POSITIONS = 1024
NUM_PROMPTS = 32
NUM_TOKENS = 100
TEMPERATURES = (0.0, 0.8)
NUM_ROWS = 256
NUM_NODES = 500


def bits_per_character(source: Path) -> float:
    """Of the model on the held-out files, windows of 256 tokens."""
    tokenizer, files = Tokenizer.from_file(str(source / "tokenizer.json")), load_corpus().heldout
    tokenizer.post_processor = None
    stream = encode_files(tokenizer, files)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return quick_loss(model, stream) / math.log(2.0) * len(stream) / sum(len(file.text) for file in files)


def accept(root: Path) -> None:
    """Prints the table of acceptance."""
    target = Bundle.open(export_reference_pair().target)
    tokenizer, num_ids = target.tokenizer(), target.manifest.architecture.tokenizer_size
    prompts = [tokenizer.encode(prompt.text) for prompt in load_prompts(NUM_PROMPTS)]
    with closing(open_target(target.model_file, ExportOptions("target"))) as runtime:
        texts = continue_prompts(runtime, prompts, TEMPERATURES, num_ids=num_ids, stop_ids=(), num_tokens=NUM_TOKENS)
    written = [token for text in texts for token in text.text]
    columns = ("draft", "bits/char", "ids covered", "text covered", "T", "accepted", "of own", "unscored", "calls/id")
    table, rates = Table(*columns), dict[float, float]()
    for kind in KINDS:
        bundle = Bundle.open(root / kind / "bundle")
        mapping, bits = VocabularyMap(tokenizer, bundle.tokenizer()), bits_per_character(root / kind / "source")
        opened = open_draft_model(bundle, num_threads=1).runtime
        assert opened is not None
        with closing(Counted(opened)) as inner:
            draft = mapped(inner, tokenizer, bundle.tokenizer())
            for temperature in TEMPERATURES:
                own = [text for text in texts if text.params.temperature == temperature]
                inner.calls = tested = hits = unscored = 0
                for position, token, logits, text in _along(draft, own, num_ids):
                    tested += 1
                    hits += candidates(logits, text.params, position, 2).tokens[0] == token
                    unscored += bool(np.isneginf(logits[token]))
                rate = hits / tested
                rates.setdefault(temperature, rate)  # of the first, which is `own`
                covered = (np.mean(mapping.token_of < mapping.num_tokens), mapping.covered(written))
                figures = (f"{rate:.3f}", f"{rate / rates[temperature]:.2f}", f"{unscored / tested:.3f}")
                calls = f"{inner.calls / tested:.2f}"
                table.add_row(
                    kind, f"{bits:.2f}", f"{covered[0]:.2f}", f"{covered[1]:.3f}", f"{temperature:g}", *figures, calls
                )
    Console(width=140).print(table)


def _along(
    draft: SequenceRuntime, texts: Sequence[Continuation], num_ids: int
) -> Iterator[tuple[int, int, NDArray[np.float32], Continuation]]:
    for text in texts:
        for position, token, logits in read_along(draft, text, num_ids):
            yield position, token, logits, text


class Counted:
    """A runtime that counts the rows that it is asked for."""

    def __init__(self, inner: SequenceRuntime) -> None:
        self._inner = inner
        self.calls = 0
        self.limits, self.truncate, self.close = inner.limits, inner.truncate, inner.close

    @property
    def length(self) -> int:
        """See `SequenceRuntime`."""
        return self._inner.length

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """See `SequenceRuntime`."""
        self.calls += 1
        return self._inner.extend(tokens)


class RandomRows:
    """A runtime that costs nothing: its rows are noise, with tokens of a text on top."""

    max_branches = 8

    def __init__(self, num_tokens: int, tokens: Sequence[int]) -> None:
        random = np.random.default_rng(0)
        self.limits = ModelLimits(num_tokens, 1 << 20)
        self.length = 0
        self._rows = 3.0 * random.standard_normal((NUM_ROWS, num_tokens), np.float32)
        self._rows[np.arange(NUM_ROWS), random.choice(tokens, NUM_ROWS)] = 18.0
        self._asked = 0

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """See `SequenceRuntime`."""
        self.length += len(tokens)
        row: NDArray[np.float32] = self.extend_branches([tokens])[0]
        return row

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See `BranchingRuntime`."""
        self._asked += len(branches)
        first = self._asked % (NUM_ROWS - 8)
        rows: NDArray[np.float32] = self._rows[first : first + len(branches)]
        return rows

    def truncate(self, length: int) -> None:
        """See `SequenceRuntime`."""
        self.length = length

    def close(self) -> None:
        """Nothing to release."""


def python_text(megabytes: float) -> list[str]:
    """Python files of this environment, the same in each run."""
    found, size = list[str](), 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        with suppress(UnicodeDecodeError, OSError):
            found.append(path.read_text(encoding="utf-8"))
            size += len(found[-1])
        if size > megabytes * 1e6:
            break
    return found


def byte_level(texts: Iterable[str], size: int, pieces: str | None, place: Path) -> Outrider:
    """A byte-level BPE of this many ids; pieces: how it splits, by default as GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pieces), behavior="isolated")] if pieces else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces is None)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*steps, last]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    save_tokenizer(tokenizer, place, MAX_POSITIONS)
    return Outrider.from_dir(place)


def memory_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def cost() -> None:
    """Prints what the map of two large vocabularies costs."""
    texts = python_text(60.0)
    with TemporaryDirectory() as folder:
        target = byte_level(texts, 152_000, PIECES, Path(folder) / "target")
        draft = byte_level(texts[::2], 100_000, None, Path(folder) / "draft")
    sample = "".join(texts[::97])[:60_000]
    rows = RandomRows(draft.size, draft.encode(sample))
    gc.collect()
    memory, began = memory_mb(), time.perf_counter()
    mapping = VocabularyMap(target, draft)
    took_s = time.perf_counter() - began
    print(f"{target.size:,} ids of the target, {draft.size:,} of the draft; the map took {took_s:.2f} s")
    gc.collect()
    print(f"memory of the map: {memory_mb() - memory:.0f} MB")
    ids = target.encode(sample)[: 8 * NUM_NODES]
    sequence = MappedSequence(rows, mapping)
    sequence.extend(ids[:64])
    for part in range(8):
        times = []
        for index in ids[64 + part * NUM_NODES : 64 + (part + 1) * NUM_NODES]:
            began = time.perf_counter()
            sequence.extend([index])
            times.append(1000.0 * (time.perf_counter() - began))
        print(f"nodes {part * NUM_NODES:,} on: median {np.median(times):.3f} ms, mean {np.mean(times):.3f} ms")
    print(f"memory then: {memory_mb() - memory:.0f} MB")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accept", "cost"))
    parser.add_argument("root", type=Path, nargs="?", default=Path("other_vocabulary"))
    options = parser.parse_args()
    if options.what == "accept":
        accept(options.root)
    else:
        cost()


if __name__ == "__main__":
    main()
