"""Renders the pair's numbers as tables for the terminal and as MODEL_CARD.md. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

TEXT = """\
# The Outrider reference pair

A Llama-style target of {target_m:.1f}M parameters and a draft of {draft_m:.2f}M, with one byte-level BPE tokenizer of
{vocabulary} entries. Both complete Python source. They exist so that speculative decoding can be seen and measured with
real acceptance, on real text, without a download. They are not chat models: they know only the Python standard library,
and their code is plausible, not correct.

* Format: Hugging Face directories `target/` and `draft/`, bfloat16 safetensors, up to 1,024 positions.
* Limit: the target was trained at context {contexts} and gets slowly worse beyond. The draft was trained at
  {draft_contexts} and distilled on rows of {row_lengths}: {limit}.
* Use: `AutoModelForCausalLM.from_pretrained(...)`, or `outrider.reference.target_dir()` and `draft_dir()`.
* `prompts.json`: prompts, the beginnings of functions and methods in held-out files, with file and line.

## Measured

On the {num_files} held-out files ({heldout_tokens:,} tokens), in fp32 from the stored bfloat16 weights. Every number
in this section comes from `PYTHONPATH=reference python -m training.evaluate`; `--check` compares a fresh run with
`metrics.json`.

{tables}

Acceptance is measured over the {new_tokens} tokens that the target writes after each of {num_prompts} prompts. Draft
and target pick with the same position-keyed noise (`models/picks/sampling`), prompt `i` with seed `i`. *In chain* is
the main figure: the share of tested draft tokens that equal the target's pick, in rounds of four drafted tokens (±
standard error). *Per position* is that share over every position; *tokens per pass* includes the target's own token;
*rejection* is the sum of min(p, q): what classic rejection sampling would accept, the most that any coupling can.
Greedy text repeats itself, which flatters its row. Distillation fits the draft to the target's text, not to human
text: its own perplexity says little.

After long contexts, at {places} places spread evenly over the same files: the same places in every row, with more or
less of the file before them, then {new_tokens} tokens by the target.

{contexts_table}

## Data

The source of the Python {python} standard library as installed: {train_files} files for training, {train_chars:.1f}M
characters, {train_tokens:.2f}M tokens. Tests, tables of data (codecs, entities, topics) and bundled wheels are left
out. {num_files} whole files are held out: of those between 6,000 and 60,000 characters, the ones whose path has the
lowest SHA-256. They are stored in `heldout.json`, so that evaluation does not depend on the Python that runs it. Corpus
fingerprint: `{fingerprint}`. Of the held-out lines of 20 characters or more, {shared:.0%} are also in a training file
(licence headers, imports, common idioms, and modules with a sibling, such as `bz2` and `lzma`).

The library is copyright the Python Software Foundation and others, under the PSF licence version 2
(<https://docs.python.org/3/license.html>). `heldout.json` and `prompts.json` quote it under that licence, and models
of this size can repeat passages of it. The weights are under the licence of this repository.

## Recipe

`PYTHONPATH=reference python -m training.train` repeats the run with the same seeds and stages. Stages are given
minutes, not steps, so the result depends on the machine and is not equal bit by bit. This run: {hardware},
Python {python}, torch {torch}, transformers {transformers}:

{stages}

* Weight matrices: Muon (momentum 0.95); embeddings and norms: AdamW (0.9, 0.95). Rates rise over the first 4 % of a
  stage and fall linearly to zero.
* bfloat16 autocast over fp32 weights, model and loss compiled together.
* Distillation: the target continues the beginnings of functions, and random passages, of its training files at
  temperatures from {low} to {high}; its 64 likeliest next tokens are recorded at every position. The draft is trained
  on that pool, first by forward KL divergence, then by the probability that shared noise makes both pick the same
  token (`outrider.export.distill.trainer.losses.match_bound`), and ends with an exponential average of its weights.
* Long distillation, on all lengths of row in every step, starts from the first distillation's weights, with a rotary
  base of {theta} in place of 10,000: the slowest rotations at 1,024 positions are then about those of 256 before. Rows
  of {short_length} are as before. Longer ones are mostly real passages of the training files, over which the target's
  distribution is recorded too, with {written} tokens by the target at their end. `--from-pair` repeats this stage
  alone, from a stored pair.
{notes}
* Seeds: data {data_seed}, target {target_seed}, draft {draft_seed}, distillation {distill_seed}, long {long_seed}.

Held-out files:

{files}
"""


def tables(metrics: Record) -> str:
    """Two Markdown tables: held-out loss of both models, acceptance by temperature."""
    lines = ["| model | parameters | loss (nats/token) | perplexity | bits per byte |", "|---|---|---|---|---|"]
    for name, loss in metrics["heldout"].items():
        lines.append(
            f"| {name} | {metrics['parameters'][name]:,} | {loss['nats_per_token']:.3f} | "
            f"{loss['perplexity']:.2f} | {loss['bits_per_byte']:.3f} |"
        )
    lines += ["", "| temperature | in chain | per position | tokens per pass | rejection |", "|---|---|---|---|---|"]
    for row in metrics["acceptance"]:
        rejection = "-" if row["temperature"] == 0.0 else f"{row['rejection']:.3f}"
        lines.append(f"| {_temperature(row)} | {_rates(row)} | {rejection} |")
    return "\n".join(lines)


def contexts_table(metrics: Record) -> str:
    """A Markdown table: acceptance by temperature and number of tokens before the target's text."""
    lines = ["| temperature | context | in chain | per position | tokens per pass |", "|---|---|---|---|---|"]
    for row in metrics["acceptance_by_context"]:
        lines.append(f"| {_temperature(row)} | {row['context']} | {_rates(row)} |")
    return "\n".join(lines)


def limit(metrics: Record, temperature: float = 0.8) -> str:
    """How acceptance at the longest context compares with that at the shortest, in words."""
    rows = [row for row in metrics["acceptance_by_context"] if row["temperature"] == temperature]
    first, last = rows[0], rows[-1]
    return (
        f"at temperature {temperature} acceptance is {first['in_chain']:.2f} after {first['context']} tokens and "
        f"{last['in_chain']:.2f} after {last['context']}"
    )


def _temperature(row: Record) -> str:
    return "0 (greedy)" if row["temperature"] == 0.0 else f"{row['temperature']}"


def _rates(row: Record) -> str:
    return f"{row['in_chain']:.3f} ± {row['error']:.3f} | {row['per_position']:.3f} | {row['tokens_per_pass']:.2f}"


def render(metrics: Record, training: Record) -> str:
    """The text of MODEL_CARD.md, from `metrics.json` and `training.json`."""
    corpus, seeds, distillation = training["corpus"], training["seeds"], training["distillation"]
    long = training["long_distillation"]
    *shorter, longest = [f"{pool['row_length']:,}" for pool in long["pools"]]
    stages = [f"{number}. {text}" for number, text in enumerate(training["stages"], start=1)]
    return TEXT.format(
        target_m=metrics["parameters"]["target"] / 1e6,
        draft_m=metrics["parameters"]["draft"] / 1e6,
        vocabulary=f"{training['vocabulary']:,}",
        contexts=training["contexts"],
        draft_contexts=training["draft_contexts"],
        row_lengths=f"{', '.join(shorter)} and {longest}",
        limit=limit(metrics),
        places=metrics["places"],
        contexts_table=contexts_table(metrics),
        theta=f"{long['rope_theta']:,.0f}",
        short_length=distillation["row_length"],
        written=f"{long['written'][0]} to {long['written'][1] - 1}",
        num_prompts=metrics["prompts"],
        new_tokens=metrics["new_tokens"],
        num_files=len(corpus["heldout"]),
        heldout_tokens=metrics["heldout"]["target"]["tokens"],
        tables=tables(metrics),
        python=corpus["python"],
        train_files=corpus["train_files"],
        train_chars=corpus["train_chars"] / 1e6,
        train_tokens=corpus["train_tokens"] / 1e6,
        fingerprint=corpus["fingerprint"],
        hardware=training["hardware"],
        torch=training["torch"],
        transformers=training["transformers"],
        stages="\n".join(stages),
        notes="\n".join(f"* {note}" for note in training["notes"]) or "* Nothing unusual happened during the run.",
        shared=corpus["heldout_lines_in_training"],
        low=distillation["sample_between"][0],
        high=distillation["sample_between"][1],
        data_seed=seeds["data"],
        target_seed=seeds["target"],
        draft_seed=seeds["draft"],
        distill_seed=seeds["distillation"],
        long_seed=seeds["long"],
        files="\n".join(f"* `{path}`" for path in corpus["heldout"]),
    )
