"""Fine-tunes a draft on its target's own continuations of the user's prompts, for `outrider-export distill`.

The order saves memory: the target writes all its text and is freed before the draft is loaded. Neither source directory
is altered, and the output appears last and whole, if its acceptance did not fall.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from outrider.export.disk import free_bytes, telling_of_full_disks
from outrider.export.distill.draft_rows import write_draft_rows
from outrider.export.distill.measure import Heldout, OtherTokenizer, make_record, measure_heldout
from outrider.export.distill.options import DistillOptions
from outrider.export.distill.prompts import Split, split_prompts
from outrider.export.distill.target import TargetText, load_for_torch, write_target_text
from outrider.export.distill.trainer.distill import TrainingResult, distill
from outrider.export.distill.trainer.files import save_json
from outrider.export.distill.trainer.losses import training_rows
from outrider.export.distill.trainer.optim import SKIP_POSITIONS, DistillPlan, Rates, Weights
from outrider.export.distill.trainer.rollout import PoolPlan
from outrider.export.distill.work import (
    RECORD_NAME,
    StateFolder,
    check_output,
    default_work,
    folder_bytes,
    locked,
    write_model,
)
from outrider.export.progress import Event, Interruption, Report, Stop, silent
from outrider.export.source.model_source import SourceModel, read_source
from outrider.export.source.prompts import encode_prompts, read_prompts
from outrider.models.bundle.build_site import BuildSite
from outrider.models.bundle.bundle_writer import flush_tree
from outrider.models.errors import ConfigError, DiskFull, RuntimeUnavailable
from outrider.models.text.tokenizer import require_same_tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

ROWS_PER_STEP = 16
_STATE_COPIES = 10
"""Most fp32 values per weight of the training's state on the disk: weights, two moments and average, twice while they
are replaced, and the best weights, old and new.
"""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """How it ended. path: the new draft, if one was written. record: the content of `distillation.json`, once measured.

    signal: the signal that stopped it. message: for the user.
    """

    status: Literal["written", "not written", "stopped"]
    message: str
    path: Path | None = None
    record: dict[str, Any] | None = None
    signal: int | None = None


def distill_draft(
    draft: str | Path,
    target: str | Path,
    prompts: Path,
    out: Path,
    options: DistillOptions,
    report: Report = silent,
) -> DistillResult:
    """Distils `draft` on `target` and writes the result to `out`, unless held-out acceptance fell.

    A draft with another tokenizer learns the target's text as its own tokens, by cross-entropy. Ctrl-C and SIGTERM save
    the state and end it; the same call continues from there. Raises TokenizerMismatch if the options ask for one
    tokenizer and the two have different ones, ExportError if a source, the prompts or the output is unusable or the
    disk is full, ConfigError for rows longer than a model's positions or a state inside `out`, RuntimeUnavailable if
    the chosen device is missing, ModelFault if logits are not finite. Then `out` is unchanged.
    """
    out = out.absolute()
    work = (options.work or default_work(out)).absolute()
    if out.resolve() in (work.resolve(), *work.resolve().parents):
        raise ConfigError(f"--work {work} is in {out}, which the result replaces; choose a --work outside of --out")
    draft_source, target_source = read_source(draft), read_source(target)
    sources = (draft_source, target_source)
    if options.same_tokenizer:
        require_same_tokenizer(draft_source.tokenizer, target_source.tokenizer)
    check_output(out, sources, overwrite=options.overwrite)
    for source in sources:
        if options.row_length > source.architecture.max_positions:
            raise ConfigError(
                f"rows of {options.row_length} tokens do not fit the {source.architecture.max_positions} positions of "
                f"{source.name}; choose a smaller --row-length"
            )
    split = _split(prompts, target_source, options)
    device = _device(options)
    with (
        telling_of_full_disks(work, out.parent, kept=f"the same command goes on from {work}, and "),
        locked(default_work(out)),
        locked(work) if work != default_work(out) else contextlib.nullcontext(),
        _threads(options.num_threads),
        Interruption(lambda text: report(Event("stop", 1.0, text, is_news=True))) as stop,
    ):
        job = _Job(draft_source, target_source, split, out, work, options, device, report)
        with contextlib.closing(job.site):
            job.site.open()  # clears what a killed process left, and puts back what it had set aside
            check_output(out, sources, overwrite=options.overwrite)
            return job.run(stop)


class _Job:
    """One distillation between its checks and its result."""

    def __init__(
        self,
        draft: SourceModel,
        target: SourceModel,
        split: Split,
        out: Path,
        work: Path,
        options: DistillOptions,
        device: str,
        report: Report,
    ) -> None:
        self.draft, self.target, self.split = draft, target, split
        self.out, self.work, self.site = out, work, BuildSite(out)
        self.device, self.report = device, report
        self._news("read", f"reading and hashing {draft.name} and {target.name}")
        self.is_mapped = draft.tokenizer.fingerprint != target.tokenizer.fingerprint
        if self.is_mapped:
            # The text was drawn at its rows' temperatures: cross-entropy at these is its likelihood, and all there is.
            options = replace(options, kl=0.0, match=0.0, cross_entropy=1.0)
            self._news(
                "read",
                f"{draft.name} has another tokenizer than {target.name}: it learns the target's text as its own "
                "tokens, by cross-entropy alone; --kl, --match and --cross-entropy have no effect",
            )
        self.options = options
        # Positions of a long prompt that do not count: all, where the target's distribution after them is not known.
        self.skip = draft.architecture.max_positions if self.is_mapped else SKIP_POSITIONS
        self.origins = (draft.describe(), target.describe())
        chosen = options.of_the_result()
        for_text = {
            "version": 2,
            "target": self.origins[1].weights_sha256,
            "tokenizer": target.tokenizer.fingerprint,
            "prompts": split.fingerprint,
            "device": device,
            **{name: chosen[name] for name in ("tokens", "row_length", "seed", "temperatures", "target_dtype")},
        }
        self.text_state = StateFolder(work, "pool", for_text)
        # The version is that of the state's format: one of another begins again.
        for_training = {
            "version": 2,
            "pool": self.text_state.path.name,
            "draft": self.origins[0].weights_sha256,
            **chosen,
        }
        if self.is_mapped:
            for_training["draft_tokenizer"] = draft.tokenizer.fingerprint
        self.training_state = StateFolder(work, "training", for_training)

    def run(self, stop: Interruption) -> DistillResult:
        """All stages in order."""
        self._require_room()
        self._describe_states()
        text_folder = self.text_state.open(resume=self.options.resume)
        training_folder = self.training_state.open(resume=self.options.resume)
        text = write_target_text(self.target, self.split, self.options, self.device, text_folder, self.report, stop)
        if text is None or stop():
            return self._stopped(stop, "while the target was writing")
        other, rows = None, text
        if self.is_mapped:
            self._news("rows", "reading the target's text as the draft's tokens")
            longest = self.draft.architecture.max_positions
            other = OtherTokenizer(VocabularyMap(self.target.tokenizer, self.draft.tokenizer), longest)
            found = write_draft_rows(text, other.mapping.text, longest, training_folder, self.report, stop)
            if found is None:
                return self._stopped(stop, "while the target's text was read")
            rows = found
        self._news("measure", "measuring the draft as it is")
        student = load_for_torch(self.draft, "float32", self.device)
        before = self._measured(student, rows, other)
        outcome = self._train(student, rows, training_folder / "run.pt", stop)
        if not outcome.is_complete:
            return self._stopped(stop, f"at step {outcome.steps}")
        partial = self.site.path("partial")
        try:
            partial.mkdir(parents=True)
            write_model(student, self.draft, partial)
            del student
            gc.collect()
            self._news("measure", "measuring the result from the written files")
            after = self._measured(load_for_torch(read_source(partial), "float32", self.device), rows, other)
            models = {
                "draft": self.origins[0].model_dump(),
                "target": self.origins[1].model_dump(),
                "tokenizer_fingerprint": self.draft.tokenizer.fingerprint,
                "target_tokenizer_fingerprint": self.target.tokenizer.fingerprint,
            }
            record = make_record(models, self.split, self.options, self.device, text, outcome, (before, after), partial)
            return self._conclude(partial, record)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _measured(self, student: PreTrainedModel, rows: TargetText, other: OtherTokenizer | None) -> Heldout:
        temperatures, num_ids = self.options.temperatures, self.draft.tokenizer.size
        return measure_heldout(student, rows, temperatures, num_ids, self.skip, other)

    def _train(self, student: PreTrainedModel, rows: TargetText, checkpoint: Path, stop: Stop) -> TrainingResult:
        options = self.options
        vocab_size = self.draft.architecture.vocab_size
        plan = DistillPlan(
            seed=options.seed,
            minutes=options.training_minutes,
            steps=options.steps,
            temperatures=options.temperatures,
            rates=Rates.like_adamw(options.rate),
            weights=Weights(options.kl, options.match, options.cross_entropy),
            rows_per_step=ROWS_PER_STEP,
            rows_per_pass=training_rows(rows.pool.row_length, vocab_size, ROWS_PER_STEP),
            skip_positions=self.skip,
            is_compiled=options.is_compiled,
        )
        return distill(
            student,
            rows.pool,
            plan,
            checkpoint,
            num_ids=self.draft.tokenizer.size,
            validation=rows.validation,
            report=self.report,
            stop=stop,
        )

    def _conclude(self, partial: Path, record: dict[str, Any]) -> DistillResult:
        """Renames the draft into place, or says why not."""
        if record["verdict"] == "worse" and not self.options.force:
            message = (
                f"{record['summary']}. Nothing was written to {self.out}. Try a lower --rate, more --tokens or "
                f"more prompts (--force writes it as it is, from the state in {self.work})"
            )
            return DistillResult("not written", message, record=record)
        save_json(record, partial / RECORD_NAME)
        check_output(self.out, (self.draft, self.target), overwrite=self.options.overwrite)
        flush_tree(partial)
        self.site.swap()
        self.training_state.remove()
        kept = ""
        if self.options.work is None:
            self.text_state.remove()
        else:
            kept = f". The target's text stays in {self.work} for further runs"
        return DistillResult("written", f"{record['summary']}. Written to {self.out}{kept}", self.out, record)

    def _describe_states(self) -> None:
        """Reports which states are continued, which begin again and why, and which are kept."""
        if not self.options.resume:
            self._news("state", f"beginning again (--no-resume); states for these inputs in {self.work} are discarded")
            return
        for state, word in ((self.text_state, "the target's text"), (self.training_state, "the training")):
            if state.is_resumed:
                self._news("state", f"continuing {word} from {state.path}")
                continue
            for path, difference in state.others:
                size = folder_bytes(path) / 1e6
                self._news("state", f"{word} begins again: {path} ({size:,.0f} MB, kept) was made with {difference}")

    def _require_room(self) -> None:
        options = self.options
        per_token = PoolPlan(0, temperatures=options.temperatures).bytes_per_token()
        # Rows hold their prompts too, which take up to as much again.
        needed = max(0, 2 * options.tokens * per_token - folder_bytes(self.text_state.path))
        if self.is_mapped:  # and the rows once more, with one next token at each position
            needed += 2 * options.tokens * PoolPlan(0, temperatures=options.temperatures, top_k=1).bytes_per_token()
        needed += self.draft.architecture.parameters * 4 * _STATE_COPIES
        free = free_bytes(self.work)
        if free < needed:
            raise DiskFull(
                f"distilling needs about {needed / 1e6:,.0f} MB at {self.work}, and {free / 1e6:,.0f} MB are free; "
                "free some space, or use another --work or fewer --tokens"
            )

    def _stopped(self, stop: Interruption, where: str) -> DistillResult:
        return DistillResult(
            "stopped",
            f"stopped {where}; the same command continues from there (state in {self.work})",
            signal=stop.signal,
        )

    def _news(self, stage: str, text: str) -> None:
        self.report(Event(stage, 0.0, text, is_news=True))


def _split(prompts: Path, target: SourceModel, options: DistillOptions) -> Split:
    def encoded(path: Path) -> list[tuple[int, ...]]:
        return encode_prompts(read_prompts(path), target.tokenizer, is_chat=options.is_chat)

    heldout = options.heldout if isinstance(options.heldout, float) else encoded(options.heldout)
    return split_prompts(encoded(prompts), heldout, seed=options.seed, max_tokens=options.row_length // 2)


def _device(options: DistillOptions) -> str:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeUnavailable("this machine has no CUDA device that its torch can use; use --device cpu")
    return "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
