"""Cuts prompts from files: the beginnings of real functions and methods.

A prompt is the class line if there is one, the decorators, the signature, the docstring and the first lines of the
body, unchanged; everything between the class line and a method is left out. Needs a function that counts tokens, and
knows nothing else of tokenizers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from outrider.reference import Prompt
from training.corpus import SourceFile, path_rank

MIN_TOKENS = 30
MAX_TOKENS = 120


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Every top-level function, and every method of a top-level class with its class, in the file's order."""
    for node in tree.body:
        if isinstance(node, Function):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function):
                    yield node, member


def cut_prompts(
    files: Iterable[SourceFile],
    count_tokens: Callable[[str], int],
    min_tokens: int = MIN_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> list[Prompt]:
    """Every prompt of `min_tokens` to `max_tokens` in the files, one per function, without duplicates.

    They are shuffled by a hash of their place. A prompt ends at the end of a line and leaves at least two lines of
    its function to write. It is the shortest with the signature, the docstring, two lines of the body and `min_tokens`.
    """
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for file in files:
        lines = file.text.split("\n")
        for owner, function in functions(ast.parse(file.text)):
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)]) - 1
            header = [] if owner is None else [lines[owner.lineno - 1], ""]
            body = function.body[0]
            opening = (body.end_lineno or body.lineno) if _is_docstring(body) else body.lineno - 1
            for last in range(opening + 2, (function.end_lineno or opening) - 1):
                text = "\n".join([*header, *lines[first:last]])
                if count_tokens(text) >= min_tokens and lines[last - 1].strip():
                    break
            else:
                continue
            if count_tokens(text) <= max_tokens and text not in seen:
                seen.add(text)
                prompts.append(Prompt(file.path, first + 1, text))
    return sorted(prompts, key=lambda prompt: path_rank(f"{prompt.file}:{prompt.line}"))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
