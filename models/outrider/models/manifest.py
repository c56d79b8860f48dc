"""What a bundle says about itself: the schema of `manifest.json`.

A manifest holds no time, path or host name, so that the same export gives the same manifest. Unknown keys are
refused: a reader that skips what it does not know might skip what matters.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"

Role = Literal["draft", "target"]
Format = Literal["openvino-ir", "safetensors"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileEntry(_Part):
    """One file of the bundle: where, how many bytes, and what they hash to.

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

    name: as its config calls it, for example "llama" or "qwen3".
    tokenizer_size: ids that the tokenizer knows; vocab_size: columns of the logits, padding included.
    parameters: how many, tied embeddings counted once.
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
    """How weights were made smaller: `scheme` as the tool names it, one scale a `granularity`."""

    tool: str
    scheme: str
    granularity: str


class Source(_Part):
    """Where the weights came from: the model's name, its revision if it has one, and a hash of its weight
    files.
    """

    name: str
    revision: str | None = None
    weights_sha256: Sha256


class Widening(_Part):
    """The target was made heavier without changing its function (DESIGN section 8): a measuring aid, not a
    model.
    """

    from_intermediate_size: Size
    from_parameters: Size
    fp32_megabytes: float = Field(gt=0.0)


class ParityStage(_Part):
    """The exported model against the source in FP32, over the logits of one kind of step.

    max_delta: largest absolute difference of a logit; scale: largest absolute source logit.
    mean_kl: mean KL divergence from the source's distribution, nats; argmax_agreement: share of equal
    argmaxes.
    """

    name: str
    rows: Size
    max_delta: float = Field(ge=0.0)
    scale: float = Field(gt=0.0)
    mean_kl: float
    argmax_agreement: Share


class Parity(_Part):
    """The numerical check that let the bundle through, in the runtime that will run it."""

    runtime: str
    max_relative_delta: float = Field(gt=0.0)
    max_mean_kl: float = Field(gt=0.0)
    min_argmax_agreement: Share
    stages: tuple[ParityStage, ...] = Field(min_length=1)


class Acceptance(_Part):
    """How often the target's pick equalled the draft's, shared noise, on held-out prompts."""

    target: str
    temperature: float = Field(ge=0.0)
    tested_tokens: Size
    rate: Share


class ExportReport(_Part):
    """What the export measured, and the versions of what made it."""

    size_bytes: Size
    parity: Parity
    acceptance: tuple[Acceptance, ...] = ()
    versions: dict[str, str]


class Manifest(_Part):
    """All of `manifest.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str = Field(min_length=1)
    role: Role
    architecture: Architecture
    format: Format
    runtime: str
    device: Literal["cpu", "gpu", "npu"]
    precision: Precision
    quantization: Quantization | None = None
    tokenizer_fingerprint: Sha256
    eos_token_ids: tuple[Count, ...]
    bos_token_id: Count | None = None
    source: Source
    widened: Widening | None = None
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
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, hence of all that it lists: the identity of the bundle."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The text of `manifest.json`: fields in the schema's order, two spaces, a final newline."""
        return self.model_dump_json(indent=2) + "\n"
