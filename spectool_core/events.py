"""What speculation did, as frozen events for hooks.

A hook is any callable that takes an event. Hooks run where the event happens, so they must be quick; what they raise
is logged and otherwise ignored. No event carries arguments or results: they may be private. Times are readings of
the event loop's clock in seconds, comparable within one run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from spectool_core.load import IDLE, Load

__all__ = [
    "CallPredicted",
    "CallResolved",
    "EngineUnavailable",
    "Event",
    "Hook",
    "LaunchSkipped",
    "Outcome",
    "OutputsPosted",
    "RunFinished",
    "RunOutcome",
    "SpeculatorFinished",
    "SpeculatorOutcome",
    "SpeculatorSkipped",
    "StreamAborted",
    "StreamAbortReason",
    "ToolObserved",
    "TurnAnswered",
    "TurnAttached",
    "TurnInjected",
    "TurnSettled",
    "TurnStarted",
    "UnavailableReason",
    "announce",
]

Outcome: TypeAlias = Literal["hit", "join", "miss"]
"""How a call of the main model was served: a finished result, a run in flight, or the tool itself."""

SpeculatorOutcome: TypeAlias = Literal["finished", "cancelled", "failed"]
"""How a speculator ended in one turn; "cancelled" is the fate of whoever is slower than the main model."""

RunOutcome: TypeAlias = Literal["succeeded", "failed", "timed_out", "not_replayable", "cancelled"]
"""How a speculative run ended."""

StreamAbortReason: TypeAlias = Literal[
    "different_request", "run_ended", "expired", "too_many", "cancelled", "cut", "malformed"
]
"""Why a stream was closed early: the next model call asked for something else, the agent run ended, nobody came for
too long or too many were kept, the model call was cancelled, or the connection or what came on it was broken."""

UnavailableReason: TypeAlias = Literal[
    "plugin_absent",
    "unreachable",
    "cut",
    "malformed",
    "other_url",
    "request_not_seen",
    "post_failed",
    "post_refused",
]
"""Why a turn is in client mode: "other_url" as the model is served elsewhere, "request_not_seen" as its HTTP client is
not one that can be followed."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A prompt went to the main model, with a choice of `tools`.

    `speculators` are all that could be asked, `load` tells how busy the event loop is.
    """

    turn: int
    time_s: float
    speculators: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    load: Load = field(default=IDLE, compare=False)


@dataclass(frozen=True, slots=True)
class SpeculatorSkipped:
    """A speculator was not asked in this turn: "no_gain", "control" (one turn without it, to compare) or a limit."""

    turn: int
    speculator: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpeculatorFinished:
    """A speculator ended, or was cancelled because the main model had answered."""

    turn: int
    speculator: str
    started_s: float
    ended_s: float
    num_calls: int
    outcome: SpeculatorOutcome


@dataclass(frozen=True, slots=True)
class CallPredicted:
    """A speculator named a call that could be run early; `probability` where it said how likely it holds it."""

    turn: int
    tool: str
    source: str
    time_s: float
    probability: float | None


@dataclass(frozen=True, slots=True)
class LaunchSkipped:
    """A call was not run early.

    `source` is the speculator that named it, or "answer" where the main model's answer holds it several times.
    `reason` is "answered" (the prediction came too late), "duplicate", "resting", "denied" (by `may_speculate`),
    "being_written", "unlikely", "too_costly", "shadow", the name of the limit that is used up, or why the call cannot
    be run early at all: "unmarked", "writes", "needs_approval", "scope_failed", "invalid_arguments", "no_key",
    "async_only", "not_served" or "unprepared".
    """

    turn: int
    tool: str
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """A speculative run of a tool ended; `started_s` is None if it never left the queue.

    `source` is the speculator whose prediction began it, or "answer" where the main model's answer itself did.
    """

    turn: int
    tool: str
    source: str
    started_s: float | None
    ended_s: float
    outcome: RunOutcome


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    """The main model answered with `num_calls` tool calls after `generation_s` seconds.

    `came_true` names speculator and tool of each prediction that did.
    """

    turn: int
    time_s: float
    generation_s: float
    num_calls: int
    came_true: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CallResolved:
    """A call of a marked tool by the main model was served.

    `saved_s` is how much of the tool's time had passed before the model asked; `waited_s` how long a join took;
    `predicted_by` names the speculators that had named the call in time, also where it was not run early (in shadow
    mode, say); `source` is the one whose run served it, None where the answer itself began the run. `reason` is empty
    unless the outcome is a miss: "not_predicted", "not_run" (named, but not run early), "queued" (not begun yet),
    "failed", "already_served", "would_block" (a run in flight, on a thread that must not wait), or why the call cannot
    be run early at all, as in `LaunchSkipped`.
    """

    turn: int
    tool: str
    outcome: Outcome
    reason: str
    time_s: float
    saved_s: float
    waited_s: float
    predicted_by: tuple[str, ...] = ()
    source: str | None = None

    @property
    def predicted(self) -> bool:
        """Whether a speculator had named the call in time."""
        return bool(self.predicted_by)


@dataclass(frozen=True, slots=True)
class ToolObserved:
    """The framework itself ran a tool for the main model."""

    tool: str
    marked: bool
    started_s: float
    ended_s: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class TurnSettled:
    """All is decided: of `num_launched` speculative runs, `num_wasted` served no call."""

    turn: int
    time_s: float
    num_launched: int
    num_wasted: int


@dataclass(frozen=True, slots=True)
class OutputsPosted:
    """Engine mode: the engine was told of early runs, `num_outputs` of which had succeeded."""

    turn: int
    time_s: float
    num_outputs: int


@dataclass(frozen=True, slots=True)
class TurnInjected:
    """Engine mode: the engine went on to this turn by itself, with the outputs of `num_calls` calls."""

    turn: int
    time_s: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class TurnAttached:
    """Engine mode: this turn is read from the stream of an earlier one; no request was sent.

    `waited_s` is how long the model call waited to learn what the engine had gone on from.
    """

    turn: int
    time_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class StreamAborted:
    """Engine mode: a stream was closed before its end.

    `turn` is the turn that last read the stream, or the one that refused to go on with it. One that nobody came for
    may have had nothing left to say.
    """

    turn: int
    time_s: float
    reason: StreamAbortReason


@dataclass(frozen=True, slots=True)
class EngineUnavailable:
    """Engine mode: this turn is in client mode.

    `status` is the HTTP status of a post that was refused; None for all other reasons.
    """

    turn: int
    time_s: float
    reason: UnavailableReason
    status: int | None = None


Event: TypeAlias = (
    TurnStarted
    | SpeculatorSkipped
    | SpeculatorFinished
    | CallPredicted
    | LaunchSkipped
    | RunFinished
    | TurnAnswered
    | CallResolved
    | ToolObserved
    | TurnSettled
    | OutputsPosted
    | TurnInjected
    | TurnAttached
    | StreamAborted
    | EngineUnavailable
)

Hook: TypeAlias = Callable[[Event], object]

_logger = logging.getLogger("spectool")


def announce(hooks: Sequence[Hook], event: Event) -> None:
    """Give `event` to every hook; what a hook raises is logged."""
    for hook in hooks:
        try:
            hook(event)
        except Exception:
            _logger.exception("a hook failed on %s", type(event).__name__)
