"""Remembers which target began a text, so that no other goes on with it.

Two targets may share a tokenizer: their ids mean the same, but the text would silently go on as another model's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.models.client.errors import EndpointLost, EndpointWrong, TargetMismatch, short


@dataclass(frozen=True, slots=True)
class Served:
    """The target behind an endpoint. target: its identity; None: the server sends none (it is older).

    has_mid: whether the server is known to be a cascade.
    """

    url: str
    model: str
    target: str | None
    has_mid: bool = False

    def __str__(self) -> str:
        identity = f"target {short(self.target)}" if self.target is not None else "no target identity"
        return f"{short(self.model)} ({identity}) at {self.url}"


@dataclass(slots=True, eq=False)
class TextOrigin:
    """Of one text. began: the target of its first token, as far as it is known. unfit: the endpoints that cannot go on
    with it, by URL.
    """

    unfit: dict[str, EndpointLost] = field(default_factory=dict)
    began: Served | None = None
    _last_url: str = ""
    _faulty: set[str] = field(default_factory=set)

    @property
    def target(self) -> str | None:
        """The identity of that target, where it has sent one."""
        return self.began.target if self.began is not None else None

    def forget_addresses(self) -> None:
        """Lets endpoints be tried again whose address was wrong: a network, or what stands before a server, changes."""
        self.unfit = {url: error for url, error in self.unfit.items() if not isinstance(error, EndpointWrong)}

    def needs_probe(self, url: str) -> bool:
        """Whether to look at the endpoint's readiness before the text goes on there: it is another than the last."""
        return self.began is not None and self.began.target is not None and url != self._last_url

    def require_same(self, served: Served) -> None:
        """Raises TargetMismatch if the text has begun with another target. A missing identity is another one too."""
        if self.began is not None and served.target != self.began.target:
            raise TargetMismatch(
                f"the text began with {self.began}; {served} serves another target and would go on with another text: "
                "give --cloud replicas of one target only"
            )

    def took_tokens(self, served: Served) -> None:
        """Call once tokens from there are used; what comes first is the text's target."""
        self.began = self.began or served
        self._last_url = served.url
        self._faulty.clear()

    def fails_again(self, url: str) -> bool:
        """Records that the model there failed on the text; whether it has before, and no token has come since."""
        is_again = url in self._faulty
        self._faulty.add(url)
        return is_again
