"""Has the target check an answer that the draft wrote alone: POST /v1/outrider/verify."""

from __future__ import annotations

from outrider.edge.modes.assemble import eased, make_agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import Mode
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.unverified import KeptAnswer, KeptText, VerifiedAnswer, VerifiedChoice, compared
from outrider.models.wire.protocol import ModelFacts


async def verify_answer(core: LocalCore, owner: bytes, answer: str, kept: KeptAnswer) -> VerifiedAnswer:
    """The target's text of each choice, one after the other, and how far the draft's agrees.

    Raises RequestError 429 or 503 where no place is free, CloudError where no cloud answers.
    """
    facts = await core.upstream.facts()
    core.places.take(owner, 1)
    try:
        choices = [await _verify(core, owner, index, text, facts) for index, text in sorted(kept.items())]
    finally:
        core.places.release(owner)
    return VerifiedAnswer(id=answer, model=facts.name, choices=choices)


async def _verify(core: LocalCore, owner: bytes, index: int, text: KeptText, facts: ModelFacts) -> VerifiedChoice:
    kept, request = text.rest(facts.target)
    new: tuple[int, ...] = ()
    reason = "length"
    if request is not None:
        settings = core.settings
        with core.drafts.lend(owner, request.prompt) as loan:
            agent = make_agent(
                Mode.STREAM,
                core.upstream.endpoints(),
                loan.drafter,
                settings.depth,
                settings.options if core.power.reason is None else eased(settings.options),
                core.drafts.scheduler,
                loan.estimates,
            )
            assert isinstance(agent, StreamAgent)
            result = await agent.generate(request, None, core.upstream.origin(facts))
            loan.has_failed = result.draft_error is not None
            loan.text = [*request.prompt, *result.tokens]
            new, reason = result.tokens, result.finish_reason
    num_confirmed, num_replaced = compared(kept, new)
    assembler = kept.style.assembler(core.tokenizer, kept.request.prompt)
    whole = assembler.push([*kept.verified, *new]) + assembler.finish()
    return VerifiedChoice(
        index=index,
        text=whole,
        finish_reason="stop" if reason == "stop" or assembler.is_stopped else "length",
        is_same=num_replaced == 0 and num_confirmed == len(new),
        confirmed_tokens=num_confirmed,
        replaced_tokens=num_replaced,
    )
