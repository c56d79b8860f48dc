"""Defines the messages of what a verifier offers for download: drafts for its target, and the target's tokenizer."""

from __future__ import annotations

from pydantic import Field

from outrider.models.bundle.manifest import Count, Sha256, Share
from outrider.models.wire.fields import TARGET, Answer

DRAFT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Pattern of an offered draft's name: one plain part of a path."""


class OfferedFile(Answer):
    """A file to download. path: relative to its bundle, or the tokenizer's; sha256: of its bytes, also its ETag."""

    path: str = Field(min_length=1, max_length=512)
    size: Count
    sha256: Sha256


class OfferedDraft(Answer):
    """A draft that the server offers for its target.

    name: the draft's in paths, unique on this server. model: the bundle's own name. tokenizer: fingerprint of the
    draft's tokenizer, where it is another than the target's. acceptance: share of drafted tokens that this target
    accepted at temperature 0.8, from the draft's card; None where it has no such measurement. files: `manifest.json`
    first.
    """

    name: str = Field(pattern=DRAFT_NAME)
    model: str
    device: str
    runtime: str
    precision: str
    tokenizer: Sha256 | None = None
    size_bytes: Count
    acceptance: Share | None = None
    files: list[OfferedFile] = Field(min_length=1)


class DraftList(Answer):
    """GET /v1/drafts: the drafts for the served target. Each file is at /v1/drafts/{name}/{path}."""

    model: str
    target: str | None = Field(default=None, description=TARGET)
    tokenizer: str = Field(description="fingerprint of the target's; every draft here that names no other has it")
    drafts: list[OfferedDraft]


class TokenizerFiles(Answer):
    """GET /v1/tokenizer: the target's tokenizer, which a device needs beside a draft with another one. Each file is at
    /v1/tokenizer/{path}.
    """

    model: str
    target: str | None = Field(default=None, description=TARGET)
    tokenizer: str = Field(description="fingerprint")
    files: list[OfferedFile] = Field(min_length=1)
