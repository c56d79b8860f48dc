"""Defines the schema of `manifest.json`, a bundle's description of itself.

A manifest holds no date, path or host name; all but `report.timing` is the same whenever the same model is exported.
Unknown keys are refused: one that is skipped might matter.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

SCHEMA_VERSION: Final = 2
MANIFEST_NAME: Final = "manifest.json"

Role = Literal["draft", "target"]
Format = Literal["openvino-ir", "onnx", "safetensors"]
Device = Literal["cpu", "gpu", "npu"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "w8a8"]
"""Of the weights; "w8a8" has INT8 activations too."""
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileEntry(_Part):
    """One file of the bundle: path, size in bytes, SHA-256.

    path: relative to the bundle, with forward slashes, without `..`.
    """

    path: str
    size: Count
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        is_plain = bool(parts) and path == "/".join(parts) and not path.startswith("/") and ".." not in parts
        if not is_plain or "\\" in path or ":" in path or "\0" in path:
            raise ValueError(f"path {path!r} is not a plain relative path")
        return path


class Architecture(_Part):
    """The shape of the model.

    name: the config's model_type, for example "llama" or "qwen3".
    tokenizer_size: ids that the tokenizer knows; vocab_size: columns of the logits, padding included.
    parameters: their number, tied embeddings counted once.
    """

    name: str
    layers: Size
    hidden_size: Size
    heads: Size
    kv_heads: Size
    head_size: Size
    intermediate_size: Size
    vocab_size: Size
    tokenizer_size: Size
    max_positions: Size
    parameters: Size

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> Architecture:
        if self.tokenizer_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer_size} ids but the model only {self.vocab_size} columns of logits"
            )
        return self


class Quantization(_Part):
    """How weights were quantized: `scheme` as the tool names it, one scale per `granularity`."""

    tool: str
    scheme: str
    granularity: str


class StaticShapes(_Part):
    """The shapes, in tokens, that an NPU's model is compiled for: the device runs no others.

    prompt_len, response_len: a sequence has at most both together. step_len: most tokens of one pass: nodes of a tree,
    or tokens of a text.
    """

    prompt_len: Size = 1024
    response_len: Size = 512
    step_len: Size = 8

    @property
    def max_positions(self) -> int:
        """Longest sequence."""
        return self.prompt_len + self.response_len


class Source(_Part):
    """Where the weights came from: the model's name, its revision if it has one, a hash of its weight files."""

    name: str
    revision: str | None = None
    weights_sha256: Sha256


class Widening(_Part):
    """Makes a target slower without changing its function: for measurements, not for use."""

    from_intermediate_size: Size
    from_parameters: Size
    fp32_megabytes: float = Field(gt=0.0)


class ParityStage(_Part):
    """The exported model against the source in FP32, over the logits of one kind of step.

    max_delta: largest absolute difference of a logit; scale: largest absolute source logit.
    mean_kl: mean KL divergence from the source's distribution, nats; argmax_agreement: share of equal argmaxes.
    """

    name: str
    rows: Size
    max_delta: float = Field(ge=0.0)
    scale: float = Field(gt=0.0)
    mean_kl: float
    argmax_agreement: Share


class Parity(_Part):
    """The numerical check that let the bundle through, in the runtime that will run it.

    checked_on: the device that ran it, in words; not the bundle's where the machine has no such device.
    max_relative_delta: None for a mixture of experts, where rounding lets some tokens choose other experts; then the
    mean KL and the agreement are bounded over all rows together.
    own_delta: largest difference between a step and the export's own prefill of the same tokens, divided by the largest
    logit; it does not include quantization.
    """

    runtime: str
    checked_on: str = "CPU"
    max_relative_delta: float | None = Field(gt=0.0)
    max_mean_kl: float = Field(gt=0.0)
    min_argmax_agreement: Share
    max_own_delta: float = Field(gt=0.0)
    own_delta: float = Field(ge=0.0)
    stages: tuple[ParityStage, ...] = Field(min_length=1)


class AtDepth(_Part):
    """Rounds that draft `depth` tokens: the share of tested tokens that were accepted, and tokens per target pass."""

    depth: Size
    rate: Share
    tokens_per_pass: float = Field(ge=1.0)


class AtWidth(_Part):
    """The share of tokens where the target's pick was among the draft's best `width` guesses."""

    width: Size
    rate: Share


class AtGap(_Part):
    """Tokens where the draft's best noisy score led the second by `from_gap` or more, up to the next entry's.

    share: of all tokens; rates: how often the target picked the best guess, and the second.
    """

    from_gap: float = Field(ge=0.0)
    share: Share
    rates: tuple[Share, Share]


class Acceptance(_Part):
    """How often the target's pick equalled the draft's, shared noise, on held-out prompts.

    rate: over every position of the target's text; error: its standard error, with prompts taken as independent.
    by_depth: rounds of several depths along the same text. by_width, by_gap: what alternatives add, and where; empty in
    bundles of earlier versions. unscored: the share of the target's picks that a draft with another tokenizer has no
    score for.
    """

    target: str
    temperature: float = Field(ge=0.0)
    tested_tokens: Size
    rate: Share
    error: float = Field(ge=0.0, default=0.0)
    by_depth: tuple[AtDepth, ...] = ()
    by_width: tuple[AtWidth, ...] = ()
    by_gap: tuple[AtGap, ...] = ()
    # Left out where it is nothing, so that versions before it read those bundles.
    unscored: Share = Field(default=0.0, exclude_if=lambda share: share == 0.0)


class TokenMapping(_Part):
    """How well a draft with another tokenizer than its target's can write the text that its acceptance was measured on.

    target_tokenizer: the fingerprint of the target's. ids_covered, text_covered: the share of all ids of the target,
    and of those of the text, that one token of the draft writes. text_kept: the share of the text's characters that the
    draft's tokenizer gives back; changes: what it changes in a text, in words.
    """

    target_tokenizer: Sha256
    ids_covered: Share
    text_covered: Share
    text_kept: Share
    changes: tuple[str, ...] = ()


class Agreement(_Part):
    """The export against the unquantized model, on the same held-out text: share of equal argmaxes, mean KL in nats."""

    rows: Size
    argmax: Share
    mean_kl: float


class AtRoundTrip(_Part):
    """Predicted speed-up over plain cloud streaming at one round trip.

    stream: streamed drafts of one guess per position. line: with alternatives pending, one path verified at a time;
    tree: any part of the tree verified. None in bundles of earlier versions.
    """

    rtt_ms: float = Field(ge=0.0)
    stream: float = Field(gt=0.0)
    stop_and_wait: float = Field(gt=0.0)
    line: float | None = Field(gt=0.0, default=None)
    tree: float | None = Field(gt=0.0, default=None)


class Forecast(_Part):
    """What the draft is expected to be worth beside its target, by `prediction.predict`.

    temperature: of the acceptance measurement. alpha: chance that a drafted token is accepted, as `predict` took it.
    draft_ms, step_ms, extra_ms: time of a drafted token, of the target's step, and what a drafted token adds to it;
    step_from: where the target's times come from, in words. fades_ms: round trip from which streamed drafts gain less
    than 5 %; breaks_even_ms: from which stop-and-wait is slower than no draft; None where that is beyond the last of
    `curve`.
    """

    temperature: float = Field(ge=0.0)
    alpha: Share
    draft_ms: float = Field(ge=0.0)
    step_ms: float = Field(gt=0.0)
    extra_ms: float = Field(ge=0.0)
    step_from: str
    curve: tuple[AtRoundTrip, ...] = Field(min_length=1)
    fades_ms: float | None = None
    breaks_even_ms: float | None = None


class Timing(_Part):
    """Measured times and the forecast from them. Not part of the bundle's identity: another run has other times.

    machine: processor and threads. provider: what ran the model, in words; is_on_device: whether that is the device
    that the bundle is for. context: tokens in the cache. token_ms: median time of a one-token step; extend_ms: of a
    step with `extend_tokens`; extra_ms: for a target, what each drafted token adds to its step. forecast: for a draft
    whose target was available. load_warning: that other processes kept the machine busy, in words; None if not.
    """

    machine: str
    provider: str
    is_on_device: bool
    context: Size
    token_ms: float = Field(gt=0.0)
    extend_tokens: Size
    extend_ms: float = Field(gt=0.0)
    extra_ms: float | None = Field(ge=0.0, default=None)
    forecast: Forecast | None = None
    load_warning: str | None = None


class ExportReport(_Part):
    """What the export measured, and the versions of its tools.

    mapping: of a draft that was judged on a target with another tokenizer. notes: what a reader should know about this
    export, one sentence each.
    """

    size_bytes: Size
    parity: Parity
    agreement: Agreement | None = None
    acceptance: tuple[Acceptance, ...] = ()
    mapping: TokenMapping | None = Field(default=None, exclude_if=lambda mapping: mapping is None)
    timing: Timing | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str]


class Manifest(_Part):
    """All of `manifest.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str = Field(min_length=1)
    role: Role
    architecture: Architecture
    format: Format
    runtime: str
    device: Device
    precision: Precision
    quantization: Quantization | None = None
    static_shapes: StaticShapes | None = None
    tokenizer_fingerprint: Sha256
    eos_token_ids: tuple[Count, ...]
    bos_token_id: Count | None = None
    source: Source
    widened: Widening | None = None
    # Of versions that trained heads; ignored, and written again as it was.
    draft_heads: dict[str, JsonValue] | None = Field(default=None, exclude_if=lambda heads: heads is None)
    files: tuple[FileEntry, ...] = Field(min_length=1)
    report: ExportReport

    @model_validator(mode="after")
    def _is_coherent(self) -> Manifest:
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths) or MANIFEST_NAME in paths:
            raise ValueError(f"files lists a path twice, or {MANIFEST_NAME} itself")
        beyond = [token for token in self.eos_token_ids if token >= self.architecture.vocab_size]
        if beyond:
            raise ValueError(f"eos_token_ids holds {beyond[0]}, outside the vocabulary")
        if (self.device == "npu") != (self.static_shapes is not None):
            raise ValueError("static_shapes belongs to a bundle for an NPU, and to no other")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest without its measurements: the identity of the bundle, through its files' hashes.

        Measurements differ in their last digits for the same files: other processors and threads add in another order.
        """
        measured = {"parity", "agreement", "acceptance", "mapping", "timing"}
        # Notes tell of measurements, too. Not excluded: an empty list was always part of the text.
        unnoted = self.model_copy(update={"report": self.report.model_copy(update={"notes": ()})})
        text = unnoted.model_dump_json(indent=2, exclude={"report": measured})
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The text of `manifest.json`: fields in the schema's order, two spaces, a final newline."""
        return self.model_dump_json(indent=2) + "\n"
