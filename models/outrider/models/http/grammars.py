"""Compiles the grammars of requests for the served model, off the event loop."""

from __future__ import annotations

from collections.abc import Callable

from outrider.models.errors import RequestError, TokenizerError
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec


class Grammars:
    """Makes the compiler on first use. make: a compiler for the served model; takes a second for a large vocabulary."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._compiler: GrammarCompiler | None = None

    async def compiled(self, spec: GrammarSpec | None, owner: bytes) -> CompiledGrammar | None:
        """The grammar; None for None. Raises RequestError as `GrammarCompiler.compile_for`."""
        if spec is None:
            return None
        if self._compiler is None:
            self._compiler = self._make()
        if not self._compiler.stop_ids:
            raise RequestError("unsupported_parameter", "this model has no end token, so no grammar can end its text")
        try:
            return await self._compiler.compile_for(spec, owner)
        except TokenizerError as error:
            raise RequestError("unsupported_parameter", str(error)) from None
