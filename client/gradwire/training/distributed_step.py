"""A step of the optimizers on several workers: it is made everywhere or nowhere, by a two-phase commit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused, StepTorn, Unavailable
from gradwire.runtime.scope import current_scope, deadline, entered
from gradwire.training.optimizer_parts import CompletedCalls, OptimizerCall, RemoteOptimizer
from gradwire.training.stepping import StepOutcome, StepRequest, StepSettings

__all__ = ["DistributedStep", "without_deadline"]

_PATIENCE_SECONDS = 0.2
"""How long a worker that is prepared alone waits for another trainer's step before it refuses as busy."""
_SHORT_PATIENCE_SECONDS = 0.02
"""The same if all workers are prepared at once: two trainers may each hold a worker that the other waits
for."""
_ABORT_SECONDS = 5.0
"""How long to try to tell a worker that a step is aborted. If that fails, the next step tells the worker."""
_OUTCOME_SECONDS = 10.0
"""How long to try to learn from a worker whether it made a step whose response was lost."""


class DistributedStep:
    """One attempt to step on all workers that have parameters of an optimizer.

    The ticket names the attempt: prepare, commit, abort and outcome refer to it.
    """

    def __init__(self, ticket: int, remotes: Sequence[RemoteOptimizer], settings: StepSettings) -> None:
        self._ticket = ticket
        self._remotes = remotes
        self._settings = settings

    def make(self, *, in_turn: bool) -> None:
        """Returns if all workers made the step, else raises StepRefused or StepTorn.

        With `in_turn`, workers are prepared one after the other, as `_prepare` says.
        """
        if len(self._remotes) == 1 and deadline() is None:
            self._step_one(self._remotes[0])
        else:
            self._prepare(in_turn=in_turn)
            self._commit()

    def _step_one(self, remote: RemoteOptimizer) -> None:
        """Steps the only worker with one request, which prepares and commits."""
        request: StepRequest = {**self._settings, "patience": _PATIENCE_SECONDS, "keep_place": True}
        call = remote.start("step", self._ticket, request)
        self._conclude([call], CompletedCalls([call]))

    def _prepare(self, *, in_turn: bool) -> None:
        """Prepares all workers, or none: raises StepRefused if a worker cannot make the step.

        The first attempt prepares all workers at once. If another trainer was stepping, the next attempts
        prepare one worker after the other, in the order of their ids (`in_turn`). All trainers keep to that
        order, so they never deadlock. Each worker lets trainers step in the order in which they came, and
        keeps a trainer's place in its queue until the trainer's next attempt.
        """
        remotes = sorted(self._remotes, key=lambda remote: remote.peer) if in_turn else self._remotes
        batches = [[remote] for remote in remotes] if in_turn else [remotes]
        patience = _PATIENCE_SECONDS if in_turn else _SHORT_PATIENCE_SECONDS
        request: StepRequest = {**self._settings, "patience": patience, "keep_place": in_turn}
        started: list[RemoteOptimizer] = []
        try:
            for batch in batches:
                started += batch
                completed = CompletedCalls(
                    [remote.start("prepare", self._ticket, request) for remote in batch]
                )
                if completed.failed:
                    raise _step_refused([(batch[index], error) for index, error in completed.failed])
        except BaseException:
            self._abort(started)
            raise

    def _abort(self, remotes: Sequence[RemoteOptimizer]) -> None:
        with without_deadline():
            linked = [remote for remote in remotes if remote.is_linked]
            CompletedCalls([remote.start("abort", self._ticket, timeout=_ABORT_SECONDS) for remote in linked])

    def _commit(self) -> None:
        # All workers are prepared. From here on neither a deadline nor a connection that is cut may leave the
        # step made on some workers only.
        with entered(current_scope()._replace(deadline=None, waits_for_link=True)):
            calls = [remote.start("commit", self._ticket) for remote in self._remotes]
            self._conclude(calls, CompletedCalls(calls))

    def _conclude(self, calls: Sequence[OptimizerCall], completed: CompletedCalls) -> None:
        """Returns if all workers made the step, else raises StepRefused or StepTorn. `calls` are those that
        make the step, one to each worker.

        A prepared worker fails here if it dies, cannot be reached for `lost_after` seconds, gave the step up
        with the trainer's lease, is stopped before it is done, or if its optimizer raises.
        """
        if not completed.failed:
            return
        remotes = self._remotes
        requested = CompletedCalls(
            [
                partial(_outcome, remotes[index], self._ticket, error, was_sent=calls[index].was_sent)
                for index, error in completed.failed
            ]
        )
        outcomes = dict.fromkeys(completed.succeeded, StepOutcome.MADE)
        outcomes.update(zip((index for index, _ in completed.failed), requested.results, strict=True))
        failures = [
            (remotes[index], error)
            for index, error in completed.failed
            if outcomes[index] != StepOutcome.MADE
        ]
        if not failures:
            return
        # A worker that is prepared and did not get the commit must not keep waiting for it.
        self._abort([remote for remote, _ in failures])
        if all(outcome == StepOutcome.NOT_MADE for outcome in outcomes.values()):
            raise _step_refused(failures)
        raise _step_torn(
            [(remotes[index].worker.target, outcome) for index, outcome in outcomes.items()], failures
        )


def without_deadline() -> AbstractContextManager[None]:
    """A block for requests that undo something: they must leave even if the time for the work is up."""
    return entered(current_scope()._replace(deadline=None))


def _outcome(remote: RemoteOptimizer, ticket: int, error: GradwireError, *, was_sent: bool) -> str:
    """The `StepOutcome` on a worker whose request failed with an error.

    The worker raises StepRefused, NotFound and Unavailable only before it makes a step; if the optimizer
    raises them, they arrive as StepTorn (`stepping.failed_step`).
    """
    if not was_sent or isinstance(error, StepRefused | NotFound | Unavailable):
        return StepOutcome.NOT_MADE
    try:
        return remote.outcome(ticket, _OUTCOME_SECONDS)
    except GradwireError:
        return StepOutcome.UNKNOWN


_WHERE = (
    ("made on", StepOutcome.MADE),
    ("made in part on", StepOutcome.HALF_MADE),
    ("maybe made on", StepOutcome.UNKNOWN),
    ("not made on", StepOutcome.NOT_MADE),
)


def _step_torn(
    outcomes: Sequence[tuple[str, str]], failures: Sequence[tuple[RemoteOptimizer, GradwireError]]
) -> StepTorn:
    """The error for a step that some workers made, or may have made or made in part, and others did not."""
    remote, cause = failures[0]
    torn = StepTorn(worker=remote.worker.target)
    torn.made = tuple(target for target, outcome in outcomes if outcome == StepOutcome.MADE)
    torn.unknown = tuple(target for target, outcome in outcomes if outcome == StepOutcome.UNKNOWN)
    torn.failed = tuple(
        target for target, outcome in outcomes if outcome not in (StepOutcome.MADE, StepOutcome.UNKNOWN)
    )
    where = ", ".join(
        f"{words} {' and '.join(targets)}"
        for words, outcome in _WHERE
        if (targets := [target for target, became in outcomes if became == outcome])
    )
    reasons = "; ".join(f"{remote.worker.target}: {error}" for remote, error in failures)
    torn.message = f"the step was {where}; go on from a checkpoint ({reasons})"
    torn.__cause__ = cause
    return torn


def _step_refused(failures: Sequence[tuple[RemoteOptimizer, GradwireError]]) -> StepRefused:
    """One error for all failures that kept a step from being made."""
    reasons = [_reason(error) for _, error in failures]
    # Any other reason outweighs "busy", after which the step would be repeated.
    first = next((index for index, reason in enumerate(reasons) if reason != "busy"), 0)
    messages = "; ".join(f"{remote.worker.target}: {error}" for remote, error in failures)
    refused = StepRefused(f"the step was not made: {messages}", worker=failures[first][0].worker.target)
    refused.reason = reasons[first]
    refused.__cause__ = failures[first][1]
    return refused


def _reason(error: GradwireError) -> str:
    """The `StepRefused.reason` for the error of one worker."""
    if isinstance(error, StepRefused):
        return error.reason
    return "lost" if isinstance(error, LinkError) else "error"
