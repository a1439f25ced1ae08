"""The tasks: what the agent is asked, and what the played-back models say.

Only the models' words are written down here. The arguments are real, and the tools' outputs come from the tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from spectool_core.testing import Answer, ScriptedCall

__all__ = ["TASKS", "Spelling", "Task", "TaskTurn"]

Spelling: TypeAlias = Callable[[ScriptedCall], ScriptedCall]
"""Gives a call of one of `archive_tools` as a framework's models have to make it."""


@dataclass(frozen=True, slots=True)
class TaskTurn:
    """One turn in which the main model asks for tools.

    Args:
        calls: what it asks for.
        predicted: what the speculator says it will ask for; None for exactly that.
        slowness: how many times longer than usual the speculator takes.
    """

    calls: Sequence[ScriptedCall]
    predicted: Sequence[ScriptedCall] | None = None
    slowness: float = 1.0

    def spelled(self, spelling: Spelling) -> TaskTurn:
        """The same turn in a framework's spelling."""
        predicted = None if self.predicted is None else [spelling(call) for call in self.predicted]
        return replace(self, calls=[spelling(call) for call in self.calls], predicted=predicted)


@dataclass(frozen=True, slots=True)
class Task:
    """One question, the turns that answer it, and the answer.

    Args:
        title: a few words for tables.
        question: what the user asks; scripts are told apart by it.
        turns: the turns with tool calls.
        answer: the main model's last words.
        predicted_last: what the speculator takes for a further turn, where there is none.
    """

    title: str
    question: str
    turns: Sequence[TaskTurn]
    answer: str
    predicted_last: Sequence[ScriptedCall] = ()

    def spelled(self, spelling: Spelling) -> Task:
        """The same task in a framework's spelling."""
        return replace(
            self,
            turns=[turn.spelled(spelling) for turn in self.turns],
            predicted_last=[spelling(call) for call in self.predicted_last],
        )

    def main_answers(self, generation_s: float) -> list[Answer]:
        """The main model's side, each answer taking `generation_s`."""
        turns = [Answer(tool_calls=turn.calls, generation_s=generation_s) for turn in self.turns]
        return [*turns, Answer(self.answer, generation_s=generation_s)]

    def speculator_answers(self, generation_s: float) -> list[Answer]:
        """The speculator's side, each answer taking `generation_s` times the turn's slowness."""
        turns = [
            Answer(
                tool_calls=turn.calls if turn.predicted is None else turn.predicted,
                generation_s=generation_s * turn.slowness,
            )
            for turn in self.turns
        ]
        last = Answer("" if self.predicted_last else "Done.", self.predicted_last, generation_s=generation_s)
        return [*turns, last]


def _search(query: str, **more: int) -> ScriptedCall:
    return ScriptedCall("search", {"query": query, **more})


def _grep(pattern: str, under: str) -> ScriptedCall:
    return ScriptedCall("grep", {"pattern": pattern, "under": under})


def _read(path: str) -> ScriptedCall:
    return ScriptedCall("read_file", {"path": path})


def _fetch(page: str) -> ScriptedCall:
    return ScriptedCall("fetch_page", {"page": page})


_LAST_TRAIN = Task(
    title="the last train",
    question=(
        "It is a Saturday in January. The weather hut forecasts gusts of 19 m/s above Saddle Halt from 17:30. Which is "
        "the last train that may leave Cairn Top, and what becomes of the 17:40?"
    ),
    turns=[
        TaskTurn(
            calls=[_search("wind limit gusts forecast last train above Saddle Halt")],
            # A default spelled out: the tool receives the same, so it is the same call.
            predicted=[_search("wind limit gusts forecast last train above Saddle Halt", limit=3)],
        ),
        TaskTurn(calls=[_read("handbook/wind-and-weather.md")]),
        TaskTurn(
            calls=[_grep(r"16:10|17:40", "operations/timetable-winter.md")],
            predicted=[_read("operations/timetable-winter.md")],
        ),
    ],
    answer=(
        "The 16:10. Above the saddle all traffic stops at 18 m/s, and the last train must have arrived at Saddle Halt "
        "half an hour before the gusts, by 17:00; the 16:10 is there at 16:26. The 17:40 becomes a short working: it "
        "starts from Saddle Halt at 17:58."
    ),
)

_SPEED = Task(
    title="the speed limit",
    question="Railcar 13 goes down this week. How fast may it pass km 7.2, and which rule sets that limit?",
    turns=[
        TaskTurn(
            calls=[_search("temporary speed restriction km 7.2"), _grep(r"[Rr]ailcar 13", "handbook")],
            # Another order, in the answer and in the arguments.
            predicted=[
                ScriptedCall("grep", {"under": "handbook", "pattern": r"[Rr]ailcar 13"}),
                _search("temporary speed restriction km 7.2"),
            ],
        ),
        TaskTurn(
            calls=[_fetch("operations/notice-14.html")],
            predicted=[_fetch("handbook/line.html"), _fetch("operations/notice-14.html")],
            slowness=2.0,
        ),
        TaskTurn(calls=[_read("handbook/brakes.md")]),
    ],
    answer=(
        "9 km/h. Notice 14 restricts km 7.2 to 7.5 to 10 km/h for all trains, at a gradient of 215 ‰. But the dynamic "
        "brake of railcar 13 is isolated, and for such a car the brake chapter allows 9 km/h on more than 200 ‰. The "
        "lower value holds."
    ),
    predicted_last=[_read("handbook/rolling-stock.md")],
)

_TOKEN = Task(
    title="a failed token",
    question=(
        "It is half past seven in the evening and the token instrument at Saddle Halt has failed again. Who is rung "
        "first, on which number? Leave a note about it for the night shift."
    ),
    turns=[
        TaskTurn(calls=[_search("token instrument Saddle Halt failure reported first to", limit=5)]),
        TaskTurn(calls=[_fetch("people/contacts.html")], predicted=[_fetch("people/rosters.html")]),
        TaskTurn(
            # Predicted correctly, and still not run early: the tool is not marked.
            calls=[
                ScriptedCall(
                    "save_note",
                    {
                        "title": "Token instrument at Saddle Halt failed",
                        "text": "Ring Ines Corvane, signalling inspector, first: mobile *47 (notice 17).",
                    },
                )
            ],
        ),
    ],
    answer=(
        "Ines Corvane, the signalling inspector, on *47. Notice 17 puts her before the technician on call for this "
        "instrument, and her office line is not diverted after 18:00. The night shift has a note."
    ),
)

_SNOW = Task(
    title="the worse month",
    question=(
        "Which month of 2031 lost more hours, January or February? Where did the plough break through in the longest "
        "closure?"
    ),
    turns=[
        TaskTurn(
            calls=[
                _grep(r"hours lost: ", "operations/log-2031-01.md"),
                _grep(r"hours lost: ", "operations/log-2031-02.md"),
            ],
        ),
        TaskTurn(calls=[_read("operations/log-2031-02.md")], predicted=[_read("operations/log-2031-01.md")]),
    ],
    answer=(
        "February: 4.0 + 9.5 + 1.5 = 15.0 hours against 3.5 + 2.0 + 6.0 = 11.5 in January. In the longest closure, on "
        "11 February, the plough broke through at km 8.8, by the upper shed."
    ),
)

TASKS: Sequence[Task] = (_LAST_TRAIN, _SPEED, _TOKEN, _SNOW)
