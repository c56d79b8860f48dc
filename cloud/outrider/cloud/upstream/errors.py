"""Defines how the upstream verifier can fail a text."""

from __future__ import annotations

from outrider.models.errors import CloudError


class UpstreamLost(CloudError):
    """It cannot be reached, is silent or overloaded, or lost the session: another attempt may succeed.

    retry_after_s: how long its answer asks to wait.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamRefused(CloudError):
    """It refuses the request, and would refuse it again. code: its own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
