"""Compiles the grammars of requests for the served model, off the event loop."""

from __future__ import annotations

from collections.abc import Callable

from outrider.models.errors import RequestError, RuntimeUnavailable, TokenizerError
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec


class Grammars:
    """Makes the compiler on first use. make: a compiler for the served model; takes a second for a large vocabulary.

    is_needed: whether a text without its grammar would be wrong; a device that only drafts goes on without the library.
    """

    def __init__(self, make: Callable[[], GrammarCompiler], *, is_needed: bool = True) -> None:
        self._make = make
        self._is_needed = is_needed
        self._compiler: GrammarCompiler | None = None

    async def compiled(self, spec: GrammarSpec | None, owner: bytes, salt: bytes = b"") -> CompiledGrammar | None:
        """The grammar; None for None. Raises RequestError as `GrammarCompiler.compile_for`."""
        if spec is None:
            return None
        try:
            if self._compiler is None:
                self._compiler = self._make()
            return await self._compile(self._compiler, spec, owner, salt)
        except RuntimeUnavailable as error:  # the library is not installed
            if not self._is_needed:
                return None
            raise RequestError("unsupported_parameter", str(error), status=501) from None

    async def _compile(
        self, compiler: GrammarCompiler, spec: GrammarSpec, owner: bytes, salt: bytes
    ) -> CompiledGrammar:
        if not compiler.stop_ids:
            raise RequestError("unsupported_parameter", "this model has no end token, so no grammar can end its text")
        try:
            return await compiler.compile_for(spec, owner, salt)
        except TokenizerError as error:
            raise RequestError("unsupported_parameter", str(error)) from None
