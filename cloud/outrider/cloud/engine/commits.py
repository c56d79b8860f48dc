"""Turns the rows of a forward pass into committed tokens: picks, accepts, moves, notifies."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud.distributions import num_tested
from outrider.cloud.engine.engine_state import EngineState, failed_text
from outrider.cloud.engine.own_sources import teach
from outrider.cloud.engine.runner import Rows, picked
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.engine.share import Share
from outrider.cloud.seam import CommitEvent, SequenceEndReason
from outrider.models.errors import ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.processors.chooser import AcceptanceChooser


class Commits(EngineState):
    """The second half of a step, on the engine's thread."""

    def _run_apart(self, shares: Sequence[Share], error: BaseException) -> list[tuple[Share, BaseException]]:
        """Runs shares again that failed together with `error`: by halves, without drafts. Commits those that succeed.

        Returns those that fail alone, each with its error. Nothing of the failed call is used: each run writes the
        keys and values of its new tokens again.
        """
        if len(shares) == 1 and not shares[0].num_drafted:
            return [(shares[0], error)]
        bare = [share.without_drafts() for share in shares]
        middle = len(bare) // 2
        failed: list[tuple[Share, BaseException]] = []
        for half in filter(None, (bare[:middle], bare[middle:])):
            try:
                rows = self._runner.forward(half)
            except KeyboardInterrupt:
                raise
            except BaseException as again:
                failed += self._run_apart(half, again)
            else:
                self._commit(half, rows, self._clock())
        return failed

    def _commit(self, shares: Sequence[Share], rows: Rows, now: float) -> None:
        """Picks row by row, accepts drafted tokens while they equal the picks, and notifies the sinks.

        A share whose rows are not finite runs again without drafts: keys of a wrong guess that are not finite reach the
        rows beside it (a masked weight of 0 times NaN is NaN), and no guess may end a sequence.
        """
        first = 0
        spoiled: list[tuple[Share, ModelFault]] = []
        refused: list[tuple[SequenceState, RequestError]] = []
        hidden = self._runner.hidden_rows() if self._config.heads is not None else None
        for share in shares:
            own = rows[first : first + share.num_rows]
            states = None if hidden is None else hidden[first : first + share.num_rows]
            first += share.num_rows
            if not share.is_complete:
                share.sequence.computed += len(share.new)
                continue
            sequence, params = share.sequence, share.sequence.request.pick.params
            try:
                branch = picked(
                    own,
                    share.drafted,
                    params,
                    len(sequence.tokens),
                    chooser=sequence.chooser,
                    stop_ids=sequence.request.stop_ids,
                    max_tokens=sequence.num_left,
                )
            except ModelFault as fault:
                spoiled.append((share, fault))
                continue
            except RequestError as error:  # a grammar's limits, or what it leaves together with other rules
                # Its traceback holds this frame, and so the error itself: a cycle, with all that the sequence holds.
                refused.append((sequence, error.with_traceback(None)))
                continue
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a library's bug, also past Exception, costs the text that met it
                if sequence.chooser is None:
                    raise
                log_fault(error)
                refused.append((sequence, failed_text()))
                continue
            teach(share, branch, own, states)
            is_held = self._move_into_place(sequence, branch.nodes)
            self._take_tokens(share, branch.tokens, branch.nodes, now, is_held=is_held)
        for sequence, refusal in refused:
            self._finish(sequence, "error", refusal, is_sound=True)
        for share, not_finite in spoiled:  # last: another forward may overwrite the rows
            self._fail(self._run_apart([share], not_finite), not_finite)

    def _move_into_place(self, sequence: SequenceState, nodes: Sequence[int]) -> bool:
        """Moves keys and values of the accepted drafted tokens to where those of the next positions belong.

        Returns whether they are there. Where the move fails, what the slots hold is not known, and the log has why.
        """
        sources, targets = self._cache.moves(sequence, nodes)
        if not sources:
            return True
        started = self._clock()
        try:
            self._runner.move(sources, targets)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a runtime may raise anything
            self._totals.faults += 1
            log_fault(error)
            return False
        finally:
            self._moved_s += self._clock() - started
        return True

    def _take_tokens(
        self, share: Share, tokens: list[int], accepted_nodes: Sequence[int], now: float, *, is_held: bool
    ) -> None:
        """Appends the picked tokens to the sequence, notifies its sink, and ends it where they end it.

        accepted_nodes: indices of the accepted drafted tokens. is_held: whether the cache holds them in their places;
        else they run again.
        """
        sequence = share.sequence
        base, proposed, accepted = len(sequence.generated), share.num_drafted, len(tokens) - 1
        pending = sequence.drafts.trie.likeliest_of_device(self._config.max_draft)
        chooser = sequence.chooser
        by_rule = chooser if isinstance(chooser, AcceptanceChooser) else None
        sequence.computed = len(sequence.tokens) + (accepted if is_held else 0)
        sequence.tokens += tokens
        sequence.generated.extend(tokens)
        num_lookup_proposed = min(sequence.drafts.num_lookup_chosen, proposed)
        looked_up = sequence.drafts.advance(tokens)
        self._cache.register_full_blocks(sequence)
        sequence.usage.count_pass(len(tokens), proposed, accepted, looked_up)
        judged, tested = None, 0
        if by_rule is not None:
            judged = tested = by_rule.num_tested
            self._totals.tolerated += by_rule.num_tolerated
        elif proposed:
            tested = num_tested(accepted, tokens, share.drafted.after(accepted_nodes))
        if proposed:
            self._distributions.verified(accepted, tested)
        self._totals.count_pass(len(tokens), proposed, accepted, num_lookup_proposed, looked_up, tested=tested)
        logprobs = tuple(chooser.logprobs) if chooser is not None else ()
        sequence.sink(CommitEvent(base, tuple(tokens), accepted, proposed, looked_up, logprobs, judged))
        reason = self._end_reason(sequence)
        if reason:
            self._finish(sequence, reason)
        else:
            self._drafting.committed(
                sequence.drafts, pending, tokens, now, crowding=self._scheduler.owners.crowding(sequence)
            )

    def _end_reason(self, sequence: SequenceState) -> SequenceEndReason | None:
        if sequence.tokens[-1] in sequence.request.stop_ids:
            return "stop"
        if sequence.num_left == 0:
            return "length" if len(sequence.generated) == sequence.request.max_tokens else "context"
        return "once" if sequence.request.once else None
