"""Whether asking a speculator pays: expected saving against what it costs, learned from turn to turn. Pure.

For each agent (known by the tools that it offers) and speculator it keeps how often a turn's call of a tool is
predicted, and how soon; for each tool how long it takes; for each agent how long its model takes, with the speculator
at work and without. One turn now and then is done the other way, so that neither side of the comparison grows stale:
as seldom as keeps what such turns cost below `_MAX_TRIAL_SHARE` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from spectool_core.estimates import Differences, RunningMean, Share
from spectool_core.load import Load
from spectool_core.model import cycle_time

__all__ = ["Appraisal", "Assessment", "Predicted", "Traits", "TurnRecord"]

_MAX_AGENTS = 256
_MAX_TOOLS = 1024

_MAX_TRIAL_SHARE = 0.005
_FIRST_CONTROLS = (3, 4)  # how many, and after how many turns each
_CONTROL_TURNS = (16, 512)
_PROBE_TURNS = (6, 48)
_NUM_BURST_TURNS = 3
_MAX_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Traits:
    """What a speculator is like; one may say so by attributes of these names.

    Args:
        cpu_s: what asking it costs the event loop.
        uses_model: it asks a model, which may be served by what serves the main model, and slow that down.
        num_first_turns: turns of an agent in which it is asked without a question, to learn what there is to learn.
    """

    cpu_s: float = 0.001
    uses_model: bool = True
    num_first_turns: int = 8

    @classmethod
    def of(cls, speculator: object) -> Traits:
        """The traits of `speculator`."""
        default = cls()
        return cls(
            getattr(speculator, "cpu_s", default.cpu_s),
            getattr(speculator, "uses_model", default.uses_model),
            getattr(speculator, "num_first_turns", default.num_first_turns),
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """One prediction: of which tool, by whom, how long after the prompt, and whether the main model made the call."""

    source: str
    tool: str
    after_s: float
    right: bool


@dataclass(slots=True)
class TurnRecord:
    """What there is to learn from one turn.

    Args:
        agent: names of the tools that were offered.
        asked: the speculators that were asked; `known` are all that could have been.
        generation_s: how long the main model took; None if it did not answer.
    """

    agent: tuple[str, ...]
    known: tuple[str, ...]
    asked: tuple[str, ...]
    generation_s: float | None = None
    predictions: list[Predicted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Assessment:
    """What is held of one speculator for one agent.

    Args:
        agent: names of the tools that the agent offers.
        speculator: its name.
        on: whether it is asked, but for single turns that measure what it is like without.
        reason: why, in words.
        gain_s: seconds expected to be gained in a turn; None before there is evidence.
        generation_s: how long the main model takes; None before there is evidence, as for what follows.
        speculator_s: how long a prediction takes.
        slowdown: by which share the main model takes longer while the speculator works.
        acceptance: for each tool, the share of turns in which a call of it was predicted rightly.
        tool_s: for each tool, how long it takes.
    """

    agent: tuple[str, ...]
    speculator: str
    on: bool
    reason: str
    gain_s: float | None
    generation_s: float | None
    speculator_s: float | None
    slowdown: float
    acceptance: Mapping[str, float]
    tool_s: Mapping[str, float]


class _Pair:
    """One speculator at one agent."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_first_turns = Traits().num_first_turns
        self.turns_on = 0
        self.turns_off = 0
        self.num_controls = 0
        self.burst = 0
        self.in_burst = False
        self.patience = 1
        self.was_on = True
        self.uses_model = True
        self.delay = RunningMean()
        self.right: dict[str, Share] = {}
        self.with_it = RunningMean(0.3)
        self.without_it = RunningMean(0.3)
        self.slowdown = Differences()


class _Agent:
    """One set of offered tools."""

    def __init__(self) -> None:
        self.generation = RunningMean()
        self.pairs: dict[str, _Pair] = {}


class Appraisal:
    """Learns from turns and decides who is asked. Not thread-safe; counts instead of drawing lots."""

    def __init__(self) -> None:
        self._agents: LRUCache[tuple[str, ...], _Agent] = LRUCache(_MAX_AGENTS)
        self._tools: LRUCache[str, RunningMean] = LRUCache(_MAX_TOOLS)

    def reason_not_to_ask(self, agent: tuple[str, ...], speculator: str, traits: Traits, load: Load) -> str | None:
        """None to ask; "no_gain" where asking would cost more than it saves, "control" to measure a turn without it.

        Args:
            agent: names of the tools that are offered.
            speculator: its name.
            traits: what it is like.
            load: how busy the event loop is.
        """
        pair = self._pair(agent, speculator)
        pair.uses_model = traits.uses_model
        gain_s = self._gain_s(agent, pair, traits.cpu_s, load)
        pair.num_first_turns = traits.num_first_turns
        pair.was_on = gain_s is None or gain_s > 0 or pair.num_asked < pair.num_first_turns
        reason = self._reason(agent, pair, gain_s)
        if reason is None:
            pair.num_asked += 1
        return reason

    def _reason(self, agent: tuple[str, ...], pair: _Pair, gain_s: float | None) -> str | None:
        if gain_s is None or pair.num_asked < pair.num_first_turns:
            return None
        if gain_s > 0:
            pair.turns_off = pair.burst = 0
            pair.patience = 1
            pair.turns_on += 1
            if pair.turns_on < self._turns_between(agent, pair, gain_s, on=True):
                return None
            pair.turns_on = 0
            pair.num_controls += 1
            return "control"
        pair.turns_on = 0
        pair.turns_off += 1
        pair.in_burst = pair.burst > 0
        if pair.in_burst or pair.turns_off >= pair.patience * self._turns_between(agent, pair, -gain_s, on=False):
            if pair.burst == 1:  # a closer look has not helped: it is right, and still does not pay
                pair.patience = min(_MAX_PATIENCE, 2 * pair.patience)
            pair.burst = max(0, pair.burst - 1)
            pair.turns_off = 0
            return None
        return "no_gain"

    def _turns_between(self, agent: tuple[str, ...], pair: _Pair, cost_s: float, *, on: bool) -> float:
        """After how many turns one is done the other way, which costs `cost_s` each time."""
        if on and not pair.uses_model:
            return math.inf  # it cannot slow the main model down
        num_first, first_turns = _FIRST_CONTROLS
        if on and pair.num_controls < num_first:
            return first_turns
        turn_s = self._wait_s(agent) or math.inf
        least, most = _CONTROL_TURNS if on else _PROBE_TURNS
        if on and not pair.slowdown.at_least:  # the more often nothing was found, the more seldom it is looked for
            least *= 2 ** (pair.num_controls - num_first)
        return min(most, max(least, cost_s / (_MAX_TRIAL_SHARE * turn_s)))

    def observe_tool(self, tool: str, duration_s: float) -> None:
        """A run of `tool` took so long."""
        known = self._tools.get(tool)
        if known is None:
            known = self._tools[tool] = RunningMean()
        known.add(duration_s)

    def observe_turn(self, record: TurnRecord) -> None:
        """A turn is over."""
        if record.generation_s is None:
            return
        agent = self._agent(record.agent)
        agent.generation.add(record.generation_s)
        for speculator in record.known:
            pair = self._pair(record.agent, speculator)
            if speculator in record.asked:
                self._observe_asked(pair, speculator, record)
            self._compare(pair, record.generation_s, asked=speculator in record.asked)

    def _observe_asked(self, pair: _Pair, speculator: str, record: TurnRecord) -> None:
        rightly = {each.tool for each in record.predictions if each.source == speculator and each.right}
        for each in record.predictions:
            if each.source == speculator:
                pair.delay.add(each.after_s)
        for tool in rightly:
            pair.right.setdefault(tool, Share())
        for tool, share in pair.right.items():
            share.add(success=tool in rightly)
        if not pair.was_on and not pair.in_burst:  # a lone success where there was none: look closer
            pair.burst = _NUM_BURST_TURNS if rightly else 0

    @staticmethod
    def _compare(pair: _Pair, generation_s: float, *, asked: bool) -> None:
        """Put a turn that is done the other way beside those around it."""
        this, other = (pair.with_it, pair.without_it) if asked else (pair.without_it, pair.with_it)
        if asked != pair.was_on and other.value is not None:
            with_it, without_it = (generation_s, other.value) if asked else (other.value, generation_s)
            pair.slowdown.add((with_it - without_it) / without_it if without_it > 0 else 0.0)
        this.add(generation_s)

    def assess(self, agent: tuple[str, ...], speculator: str, traits: Traits, load: Load) -> Assessment:
        """What is held of `speculator` for `agent`."""
        pair = self._pair(agent, speculator)
        gain_s = self._gain_s(agent, pair, traits.cpu_s, load)
        on = gain_s is None or gain_s > 0 or pair.num_asked < traits.num_first_turns
        tools = {tool: share.mean for tool, share in pair.right.items()}
        return Assessment(
            agent=agent,
            speculator=speculator,
            on=on,
            reason=_in_words(gain_s, on=on),
            gain_s=gain_s,
            generation_s=self._agent(agent).generation.value,
            speculator_s=pair.delay.value,
            slowdown=pair.slowdown.at_least,
            acceptance=tools,
            tool_s={tool: known for tool in tools if (known := self.tool_s(tool)) is not None},
        )

    def pairs(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Every agent and speculator that something is held of."""
        return [(agent, speculator) for agent, known in self._agents.items() for speculator in known.pairs]

    def tool_s(self, tool: str) -> float | None:
        """How long `tool` takes; None before it has run."""
        known = self._tools.get(tool)
        return known.value if known is not None else None

    def generation_s(self, agent: tuple[str, ...]) -> float | None:
        """How long the agent's model takes; None before it has answered."""
        return self._agent(agent).generation.value

    def _gain_s(self, agent: tuple[str, ...], pair: _Pair, cpu_s: float, load: Load) -> float | None:
        """Seconds by which a turn is expected to be shorter if the speculator is asked; None if nobody can say."""
        generation_s = self._agent(agent).generation.value
        if generation_s is None or any(share.num_trials < 1 for share in pair.right.values()):
            return None
        wait_s = self._wait_s(agent) or generation_s
        saving_s = self._saving_s(pair, generation_s)
        busy_s = max(0.0, load.cpu_per_turn_s - (cpu_s if pair.was_on else 0.0))
        without_s = cycle_time(load.num_agents, cpu_s=busy_s, wait_s=wait_s)
        shorter_s = max(0.0, wait_s - saving_s + pair.slowdown.at_least * generation_s)
        return without_s - cycle_time(load.num_agents, cpu_s=busy_s + cpu_s, wait_s=shorter_s)

    def _saving_s(self, pair: _Pair, generation_s: float) -> float:
        left_s = max(0.0, generation_s - (pair.delay.value or 0.0))
        hidden_s = (share.mean * min(self.tool_s(tool) or 0.0, left_s) for tool, share in pair.right.items())
        return min(left_s, sum(hidden_s))

    def _wait_s(self, agent: tuple[str, ...]) -> float | None:
        """How long a turn of the agent waits for its model and its tools without speculation, as far as is known."""
        known = self._agent(agent)
        if known.generation.value is None:
            return None
        shares = [pair.right.items() for pair in known.pairs.values()]
        tools = {tool for items in shares for tool, _ in items}
        return known.generation.value + max((self.tool_s(tool) or 0.0 for tool in tools), default=0.0)

    def _agent(self, agent: tuple[str, ...]) -> _Agent:
        known = self._agents.get(agent)
        if known is None:
            known = self._agents[agent] = _Agent()
        return known

    def _pair(self, agent: tuple[str, ...], speculator: str) -> _Pair:
        return self._agent(agent).pairs.setdefault(speculator, _Pair())


def _in_words(gain_s: float | None, *, on: bool) -> str:
    if gain_s is None:
        return "not enough turns yet"
    if gain_s > 0:
        return f"a turn is expected to be {gain_s:.3f} s shorter with it"
    return "not enough turns yet" if on else f"a turn is expected to be {-gain_s:.3f} s longer with it"
