"""Measures the reference pair on held-out files: `PYTHONPATH=reference python -m training.evaluate`.

Prints held-out perplexity and the acceptance table; with `--check` compares them with `metrics.json`, which is kept
beside the models, and exits with status 1 where they differ by more than another processor's rounding explains.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.export.distill.trainer.acceptance import Score, continue_prompts, row_logits, score, summarize
from outrider.reference import draft_dir, load_prompts, pair_dir, target_dir
from training import card
from training.corpus import SourceFile
from training.data import SEPARATOR_ID

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
NUM_PROMPTS = 256
NEW_TOKENS = 96
CONTEXTS = (100, 300, 600, 900)
CONTEXT_TEMPERATURES = (0.0, 0.8)
NUM_PLACES = 96
ROWS_AT_ONCE = 32
HERE = pair_dir()
ACCEPTANCE_TOLERANCE = 0.015
"""Absolute. Another processor rounds differently, so a sampled text may differ from the stored run's at some point."""

LOSS_TOLERANCE = 0.005
TEXT_TOLERANCE = 0.05
"""Relative."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Held-out loss: mean nats per token, its exponential, and bits per byte of UTF-8 text."""

    tokens: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, tokenizer: Tokenizer, files: Sequence[SourceFile], context: int = 512) -> Loss:
    """Scores every token of every file, each with at least `context // 4` tokens before it or all there are."""
    nats, tokens, num_bytes = 0.0, 0, 0
    overlap = context // 4
    stride = context - overlap
    for file in files:
        ids = torch.tensor([SEPARATOR_ID, *tokenizer.encode(file.text).ids])
        num_bytes += len(file.text.encode())
        for start in range(0, max(1, len(ids) - 1 - overlap), stride):
            window = ids[start : start + context + 1]
            fresh = 0 if start == 0 else overlap
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0, fresh:].float()
            nats += float(torch.nn.functional.cross_entropy(logits, window[1 + fresh :], reduction="sum"))
            tokens += len(window) - 1 - fresh
    mean = nats / tokens
    return Loss(tokens, mean, math.exp(mean), nats / math.log(2.0) / num_bytes)


def load_heldout() -> list[SourceFile]:
    """The held-out files as they were when the pair was trained, whatever Python runs now."""
    entries = json.loads((HERE / "heldout.json").read_text(encoding="utf-8"))
    return [SourceFile(**entry) for entry in entries]


def heldout_passages(tokenizer: Tokenizer, files: Sequence[SourceFile], count: int, length: int) -> list[list[int]]:
    """`count` passages of `length` tokens `[count, length]`, spread evenly over all places where one fits a file."""
    texts = [tokenizer.encode(file.text).ids for file in files]
    places = [(text, first) for text in texts for first in range(len(text) - length + 1)]
    if not 0 < count <= len(places):
        raise ValueError(f"{count} passages of {length} tokens; the files have room for 1 to {len(places)}")
    chosen = (places[(2 * number + 1) * len(places) // (2 * count)] for number in range(count))
    return [list(text[first : first + length]) for text, first in chosen]


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    *,
    rows: int | None = None,
    with_rejection: bool = True,
) -> dict[str, object]:
    """Acceptance over NEW_TOKENS of the target's text after each prompt, or until it ends; temperature 0 is greedy.

    rows: prompts at once while the target writes, None for all. with_rejection: also measures what rejection sampling
    would accept, for which the target reads all its text once more.
    """
    end = target.config.eos_token_id
    stop_ids = end if isinstance(end, list) else [] if end is None else [end]
    scores: list[Score] = []
    overlap = 0.0
    for passage in continue_prompts(target, prompts, temperature, NEW_TOKENS, stop_ids=stop_ids, rows=rows) or ():
        found, drafted = score(draft, passage, temperature)
        scores.append(found)
        if with_rejection and temperature > 0.0:
            p = torch.softmax(row_logits(target, passage.ids, passage.start) / temperature, dim=-1)
            q = torch.softmax(drafted / temperature, dim=-1)
            overlap += float(torch.minimum(p, q).sum())
        else:
            overlap += found.hits
    summary = summarize(temperature, scores)
    return asdict(summary) | ({"rejection": overlap / summary.positions} if with_rejection else {})


def by_context(
    target: PreTrainedModel, draft: PreTrainedModel, passages: Sequence[Sequence[int]]
) -> list[dict[str, object]]:
    """Acceptance after the last 100, 300, 600 and 900 tokens of every passage: the same places, more context."""
    rows: list[dict[str, object]] = []
    for temperature in CONTEXT_TEMPERATURES:
        for length in CONTEXTS:
            prompts = [passage[-length:] for passage in passages]
            found = measure(target, draft, prompts, temperature, rows=ROWS_AT_ONCE, with_rejection=False)
            rows.append({"context": length} | found)
    return rows


def evaluate(target: Path, draft: Path, num_prompts: int = NUM_PROMPTS) -> dict[str, object]:
    """All that `metrics.json` holds, computed in fp32 from the models stored in the two directories."""
    models = {"target": load_model(target), "draft": load_model(draft)}
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    files = load_heldout()
    prompts = [tokenizer.encode(prompt.text).ids for prompt in load_prompts(num_prompts)]
    passages = heldout_passages(tokenizer, files, min(num_prompts, NUM_PLACES), max(CONTEXTS))
    acceptance = [measure(models["target"], models["draft"], prompts, temperature) for temperature in TEMPERATURES]
    return {
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "heldout": {name: asdict(heldout_loss(model, tokenizer, files)) for name, model in models.items()},
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "acceptance": acceptance,
        "places": len(passages),
        "acceptance_by_context": by_context(models["target"], models["draft"], passages),
    }


def load_model(directory: Path) -> PreTrainedModel:
    """The model in `directory`, in fp32, ready for evaluation."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def differences(found: Mapping[str, object], stored: Mapping[str, object]) -> list[str]:
    """One line for each number of `found` that differs from `stored` by more than rounding explains."""
    lines: list[str] = []
    expected = dict(_numbers(stored))
    for path, value in _numbers(found):
        before = expected.get(path)
        if before is None:
            lines.append(f"{path}: {value} is not in metrics.json, which another version wrote; use --write")
        elif abs(value - before) > _allowed(path, before):
            lines.append(f"{path}: measured {value:.4f}, stored {before:.4f}")
    return lines


def _allowed(path: str, stored: float) -> float:
    name = path.rpartition("/")[2]
    if name in ("per_position", "in_chain", "rejection", "error"):
        return ACCEPTANCE_TOLERANCE
    if name in ("nats_per_token", "perplexity", "bits_per_byte"):
        return LOSS_TOLERANCE * stored
    return TEXT_TOLERANCE * stored if name in ("positions", "tokens_per_pass") else 0.0


def _numbers(value: object, path: str = "") -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _numbers(item, f"{path}/{key}")]
    if isinstance(value, list):
        return [pair for index, item in enumerate(value) for pair in _numbers(item, f"{path}/{index}")]
    return [(path, float(value))] if isinstance(value, int | float) else []


def main() -> int:
    """Runs the evaluation; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=target_dir(), help="directory of the target")
    parser.add_argument("--draft", type=Path, default=draft_dir(), help="directory of the draft")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="number of prompts to use")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="compare with metrics.json")
    parser.add_argument("--write", action="store_true", help="write metrics.json and MODEL_CARD.md")
    arguments = parser.parse_args()
    if (arguments.check or arguments.write) and arguments.prompts != NUM_PROMPTS:
        parser.error(f"--check and --write need the first {NUM_PROMPTS} prompts; leave out --prompts")
    metrics = evaluate(arguments.target, arguments.draft, arguments.prompts)
    print(
        json.dumps(metrics, indent=2) if arguments.json else f"{card.tables(metrics)}\n\n{card.contexts_table(metrics)}"
    )
    stored = HERE / "metrics.json"
    if arguments.write:
        stored.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        training = json.loads((HERE / "training.json").read_text(encoding="utf-8"))
        (HERE / "MODEL_CARD.md").write_text(card.render(metrics, training), encoding="utf-8")
    if arguments.check:
        lines = differences(metrics, json.loads(stored.read_text(encoding="utf-8")))
        print("\n".join(lines) if lines else "every number agrees with metrics.json")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
