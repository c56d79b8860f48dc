"""Injects faults, reproducibly: drafts that are lost, doubled, late or out of order.

For tests and benches. The text must stay the same.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from outrider.edge.link.sender import Posts
from outrider.models.client.errors import EndpointLost
from outrider.models.client.messages import DraftMessage


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Chances, 0 to 1, that a message is dropped, sent twice, or held back by up to max_delay_s (which reorders)."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    max_delay_s: float = 0.05


class FaultyPosts:
    """Wraps `VerifierClient.post_drafts`. The same seed and the same messages meet the same faults."""

    def __init__(self, posts: Posts, rates: FaultRates, seed: int = 0) -> None:
        self._posts = posts
        self._rates = rates
        self._random = random.Random(seed)

    async def post_drafts(self, session: str, message: DraftMessage) -> float | None:
        """Delivers, or not; a dropped message raises EndpointLost as a broken connection would."""
        rates, chance = self._rates, self._random
        is_dropped = chance.random() < rates.drop
        is_doubled = chance.random() < rates.duplicate
        delay_s = chance.random() * rates.max_delay_s if chance.random() < rates.delay else 0.0
        if is_dropped:
            raise EndpointLost("the message was dropped on purpose")
        if delay_s:
            await asyncio.sleep(delay_s)
        held_ms = await self._posts.post_drafts(session, message)
        if is_doubled:
            held_ms = await self._posts.post_drafts(session, message)
        return held_ms
