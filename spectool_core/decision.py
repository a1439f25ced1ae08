"""What to do with a prediction, and with a call of the main model: pure rules, no clock and no IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Claim",
    "Hit",
    "Join",
    "Launch",
    "LaunchDecision",
    "Miss",
    "RunState",
    "Skip",
    "decide_claim",
    "decide_launch",
]

RunState: TypeAlias = Literal["queued", "running", "succeeded", "failed"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the tool now."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not start the tool, for `reason`."""

    reason: str


LaunchDecision: TypeAlias = Launch | Skip


@dataclass(frozen=True, slots=True)
class Hit:
    """Serve the finished result."""


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the run in flight and serve its result."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Run the tool as the framework would have, for `reason`."""

    reason: str


Claim: TypeAlias = Hit | Join | Miss


def decide_launch(
    *, shadow: bool, answered: bool, present: bool, resting: bool, denied: bool, objection: str | None
) -> LaunchDecision:
    """Whether a valid predicted call of a marked tool is run.

    Args:
        shadow: only predictions are wanted.
        answered: the main model has already answered this turn.
        present: a usable run or result for the same key exists.
        resting: the tool failed or could not be replayed when last run early.
        denied: the user's `may_speculate` said no.
        objection: what else speaks against it: a write under way, its worth, or a limit that is used up.
    """
    if answered:
        return Skip("answered")
    if present:
        return Skip("duplicate")
    if resting:
        return Skip("resting")
    if denied:
        return Skip("denied")
    if objection is not None:
        return Skip(objection)
    if shadow:
        return Skip("shadow")
    return Launch()


def decide_claim(state: RunState | None, *, due: bool, predicted: bool) -> Claim:
    """How a call of the main model is served.

    Args:
        state: the state of the usable run for the call's key; None if there is none.
        due: the answer asked for this key more often than it has been served. A further execution of the same call
            (a retry, a polling wrapper) runs the tool, as it would have.
        predicted: a speculator had named the call.
    """
    if not due:
        return Miss("already_served")
    match state:
        case None:
            return Miss("not_run" if predicted else "not_predicted")
        case "queued":
            return Miss("queued")
        case "failed":
            return Miss("failed")
        case "running":
            return Join()
        case "succeeded":
            return Hit()
