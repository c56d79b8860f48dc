"""Continues a conversation's ids by what the template adds.

A server renders the whole conversation as text and tokenizes it. What it gives for the turns before is mostly, and not
always, what was rendered and generated: a model may write a text with other tokens than its tokenizer. The ids that the
caches hold are kept as long as the rendered ids have the same text, and a token begins where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.tokenizer import Tokenizer


def continued(tokenizer: Tokenizer, kept: Sequence[int], rendered: Sequence[int]) -> list[int] | None:
    """The ids `kept` and those of `rendered` that follow the same text.

    None where `rendered` begins with another text, or no token begins after it: then its own ids are the prompt.
    """
    shared = num_shared(kept, rendered)
    own, start = kept[shared:], shared
    if own:
        context = kept[:shared]
        detokenizer = tokenizer.detokenizer(context=context, skip_special_tokens=False)
        text = detokenizer.push(own) + detokenizer.flush()
        detokenizer = tokenizer.detokenizer(context=context, skip_special_tokens=False)
        found = ""
        while len(found) < len(text) and start < len(rendered):
            found += detokenizer.push(rendered[start])
            start += 1
        if found != text:
            return None
    return [*kept, *rendered[start:]] if start < len(rendered) else None


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that both have."""
    shared = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        shared += 1
    return shared
