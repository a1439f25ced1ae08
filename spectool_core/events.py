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
    "ToolObserved",
    "TurnAnswered",
    "TurnAttached",
    "TurnInjected",
    "TurnSettled",
    "TurnStarted",
    "announce",
]

Outcome: TypeAlias = Literal["hit", "join", "miss"]
"""How a call of the main model was served: a finished result, a run in flight, or the tool itself."""

SpeculatorOutcome: TypeAlias = Literal["finished", "cancelled", "failed"]
"""How a speculator ended in one turn; "cancelled" is the fate of whoever is slower than the main model."""

RunOutcome: TypeAlias = Literal["succeeded", "failed", "timed_out", "not_replayable", "cancelled"]
"""How a speculative run ended."""


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
    """A predicted call was not run, and why."""

    turn: int
    tool: str
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """A speculative run of a tool ended; `started_s` is None if it never left the queue."""

    turn: int
    tool: str
    source: str
    started_s: float | None
    ended_s: float
    outcome: RunOutcome


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    """The main model answered with `num_calls` tool calls after `generation_s` seconds.

    `predicted` names speculator and tool of each prediction that came true.
    """

    turn: int
    time_s: float
    generation_s: float
    num_calls: int
    predicted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CallResolved:
    """A call of a marked tool by the main model was served.

    `saved_s` is how much of the tool's time had passed before the model asked; `waited_s` how long a join took;
    `predicted_by` names the speculators that had named the call in time, also where it was not run early (in shadow
    mode, say); `source` is the one whose run served it.
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
    """Engine mode: this turn is read from the stream of an earlier one, after `waited_s`; no request was sent."""

    turn: int
    time_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class StreamAborted:
    """Engine mode: a stream was closed before its end.

    `reason` is "different_request" (the next model call asked for something else), "run_ended", "expired", "too_many",
    "cancelled", "cut" or "malformed". `turn` is the one that it was last read in, or that did not go on with it. One
    that nobody came for may have had nothing left to say.
    """

    turn: int
    time_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class EngineUnavailable:
    """Engine mode: this turn is in client mode.

    `reason` is "plugin_absent", "unreachable", "cut", "malformed", "other_url" (the model is served elsewhere),
    "request_not_seen" (its HTTP client is not one that can be followed), "post_failed", or "post_refused_" and an HTTP
    status.
    """

    turn: int
    time_s: float
    reason: str


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
