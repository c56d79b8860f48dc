"""Defines the one tree of errors that Outrider raises on purpose.

    OutriderError
    ├── ConfigError            an option or parameter is out of range or contradicts another
    │   └── SamplingError      a sampling parameter is out of range or not a number
    ├── BundleError            a bundle is missing, altered, incomplete or of another schema
    ├── TokenizerError         a tokenizer cannot be loaded or cannot do what was asked
    │   └── TokenizerMismatch  draft and target do not share one tokenizer
    ├── ExportError            a model cannot be exported
    │   ├── DiskFull           there is no room for what an export writes
    │   └── ParityFailure      an export computes other logits than its source
    ├── RuntimeUnavailable     a device, a runtime or its package is not on this machine
    ├── ModelFault             a model produced something unusable (NaN logits, a wrong shape)
    ├── RequestError           a request that the server refuses; has a stable `code` and an HTTP status
    └── CloudError             the agent cannot get what it needs from any cloud endpoint

Every message says what was found, what was expected, and one thing to do about it. Asserts are for our own bugs.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of everything that Outrider raises on purpose."""


class ConfigError(OutriderError):
    """An option or parameter is out of range or contradicts another."""


class SamplingError(ConfigError):
    """A sampling parameter is out of range or not a number."""


class BundleError(OutriderError):
    """A bundle is missing, altered, incomplete or of another schema."""


class TokenizerError(OutriderError):
    """A tokenizer cannot be loaded or cannot do what was asked."""


class TokenizerMismatch(TokenizerError):
    """Draft and target do not share one tokenizer."""


class ExportError(OutriderError):
    """A model cannot be exported."""


class DiskFull(ExportError):
    """There is no room for what an export writes."""


class ParityFailure(ExportError):
    """An export computes other logits than its source.

    relative_delta: the largest difference of a logit, divided by the largest logit.
    """

    def __init__(self, message: str, relative_delta: float) -> None:
        super().__init__(message)
        self.relative_delta = relative_delta


class RuntimeUnavailable(OutriderError):
    """A device, a runtime or its package is not on this machine."""


class ModelFault(OutriderError):
    """A model produced something unusable, such as NaN logits."""


class RequestError(OutriderError):
    """A request that the server refuses.

    `code` is stable and meant for programs, `status` is the HTTP status that goes with it. retry_after_s: when another
    try may succeed; None: not known. origin: address of the server that said it; `message` is without. param: the field
    that it is about.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = 400,
        retry_after_s: int | None = None,
        origin: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(f"{message} (from {origin})" if origin else message)
        self.message = message
        self.origin = origin
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s
        self.param = param


class CloudError(OutriderError):
    """The agent cannot get what it needs from any cloud endpoint."""
