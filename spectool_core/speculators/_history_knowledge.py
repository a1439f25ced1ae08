"""What has been learned for one tenant: which call follows what, and which templates lead to its arguments."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachetools import LRUCache

from spectool_core.speculators._history_conversation import Answer, Conversation
from spectool_core.speculators._history_rates import Calibration, Rates, Situation
from spectool_core.speculators._history_templates import Lookup, Template, templates_of
from spectool_core.speculators._history_values import call_key, value_key
from spectool_core.speculators.prediction import Prediction

__all__ = ["Forecast", "Knowledge", "TemplateRates"]

_MAX_TOOLS = 128
_MAX_TEMPLATES_PER_TOOL = 64
_MAX_SITUATIONS_OF_TOOL = 256
_MAX_CONSTANT = 500
_MAX_SEEN_VALUES = 8192

_UNTRIED = 0.05
_UNCALLED = 0.01


@dataclass(frozen=True, slots=True)
class TemplateRates:
    """What has come of one template.

    Args:
        fits: of the calls of its tool, how many it would have led to.
        follows: of all answers, how many held the call that it would have led to.
    """

    fits: Rates = field(default_factory=Rates)
    follows: Rates = field(default_factory=Rates)


class _Filled(NamedTuple):
    """A template with what it was filled with, and in which situations: general ones, and the present one."""

    template: Template
    call: Hashable
    general: tuple[Situation, ...]
    present: Situation


class _Candidate(NamedTuple):
    name: str
    arguments: dict[str, Any]
    probability: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an answer was expected to be, to be compared with what it is.

    Args:
        situations: the present one, whatever the call, from general to special.
        filled: the templates that could be filled.
        candidates: the calls that they led to.
    """

    situations: tuple[Situation, ...]
    filled: list[_Filled]
    candidates: dict[Hashable, _Candidate]


class Knowledge:
    """Learns from answers what follows what. Not thread-safe; bounded.

    A call's probability is that of its tool in the present situation, times the share of its calls that the template
    fits, drawn to how often the template's call has been the very next answer in this situation. Where several
    templates lead to one call, the best speaks for it.

    Args:
        calibration: of an earlier time.
        tools: names of those whose calls are predicted; None for all.
    """

    def __init__(self, calibration: Calibration | None = None, tools: Collection[str] | None = None) -> None:
        self._predicted = tools
        self.calibration = calibration or Calibration()
        self.num_answers = 0
        self.num_calls = 0
        self.num_templates = 0
        self._tools: LRUCache[str, Rates] = LRUCache(_MAX_TOOLS)
        self._templates: dict[str, dict[Template, TemplateRates]] = {}
        self._seen: LRUCache[Hashable, int] = LRUCache(_MAX_SEEN_VALUES)

    def forecast(self, conversation: Conversation, tools: Collection[str] | None = None) -> Forecast:
        """What may follow now; calls of `tools` only, where they are given."""
        lookup = Lookup(conversation)
        found = [
            (template, rates, *filling)
            for tool, templates in self._templates.items()
            if tools is None or tool in tools
            for template, rates in templates.items()
            if (filling := lookup.fill(template)) is not None
        ]
        calls = [call_key(template.tool, arguments) for template, _, arguments, _ in found]
        offered = {
            template.tool
            for (template, _, _, _), call in zip(found, calls, strict=True)
            if _is_said_by_user(template) and call not in conversation.made
        }
        situations = _situations(conversation, offered)
        likely = {
            tool: self._tools[tool].probability(situations, _UNCALLED) if tool in self._tools else _UNCALLED
            for tool in self._templates
        }
        of_call = {
            (made, fresh): _situations_of_call(situations, made, fresh)
            for made in (False, True)
            for fresh in (False, True)
        }
        filled: list[_Filled] = []
        candidates: dict[Hashable, _Candidate] = {}
        for (template, rates, arguments, fresh), call in zip(found, calls, strict=True):
            each = _Filled(template, call, *of_call[call in conversation.made, fresh])
            filled.append(each)
            fits = rates.fits.probability(each.general, _UNTRIED)
            probability = rates.follows.probability((each.present,), likely[template.tool] * fits)
            if call not in candidates or candidates[call].probability < probability:
                candidates[call] = _Candidate(template.tool, arguments, probability)
        return Forecast(situations, filled, candidates)

    def predictions(self, forecast: Forecast, *, max_predictions: int, min_probability: float) -> list[Prediction]:
        """The most probable calls of a forecast, the most probable first."""
        likely = sorted(forecast.candidates.values(), key=lambda candidate: -candidate.probability)[:max_predictions]
        predictions = [
            Prediction(name, arguments, probability=self.calibration.corrected(probability))
            for name, arguments, probability in likely
        ]
        return [prediction for prediction in predictions if prediction.probability >= min_probability]

    def learn(self, conversation: Conversation, forecast: Forecast, answer: Answer, origin: int) -> None:
        """Compare a forecast with the answer, and find new templates.

        Args:
            conversation: what was known before the answer.
            forecast: made of it.
            answer: of the main model.
            origin: tells conversations apart: a constant is what was seen in two of them.
        """
        names = {call.name for call in answer.calls}
        made = {call_key(call.name, call.arguments) for call in answer.calls if call.arguments is not None}
        for key, candidate in forecast.candidates.items():
            self.calibration.add(candidate.probability, right=key in made)
        for name in names:
            if name not in self._tools:
                self._tools[name] = Rates(max_situations=_MAX_SITUATIONS_OF_TOOL)
        for name, rates in self._tools.items():
            rates.add(forecast.situations, right=name in names)
        for filled in forecast.filled:
            self._compare(filled, names, made)
        self.num_answers += 1
        self.num_calls += len(answer.calls)
        for call in answer.calls:
            if call.arguments is not None and (self._predicted is None or call.name in self._predicted):
                self._find_templates(call.name, call.arguments, conversation, origin)

    def _compare(self, filled: _Filled, names: Collection[str], made: Collection[Hashable]) -> None:
        rates = self._templates.get(filled.template.tool, {}).get(filled.template)
        if rates is None:  # it has been dropped since
            return
        rates.follows.add((filled.present,), right=filled.call in made)
        if filled.template.tool in names:
            rates.fits.add(filled.general, right=filled.call in made)

    def _find_templates(self, name: str, arguments: Mapping[str, Any], conversation: Conversation, origin: int) -> None:
        repeated = [argument for argument in arguments if self._was_seen(name, argument, arguments[argument], origin)]
        for template in templates_of(name, arguments, conversation, repeated):
            if template not in self._templates.get(name, {}):
                # That it leads to this call is no evidence: many do.
                self.add(template, TemplateRates())

    def _was_seen(self, name: str, argument: str, value: Any, origin: int) -> bool:
        """Whether another conversation had this value; only its hash is remembered."""
        return self._seen.setdefault(hash((name, argument, value_key(value))), origin) != origin

    def add(self, template: Template, rates: TemplateRates) -> None:
        """Add a template, in the place of the least useful one of its tool where there are too many."""
        if self._predicted is not None and template.tool not in self._predicted:
            return
        if any(len(text) > _MAX_CONSTANT for _, text in template.constants):
            return
        if template.tool not in self._templates and len(self._templates) >= _MAX_TOOLS:
            least = min(self._templates, key=lambda tool: max(map(_use, self._templates[tool].values())))
            self.num_templates -= len(self._templates.pop(least))
        templates = self._templates.setdefault(template.tool, {})
        if len(templates) >= _MAX_TEMPLATES_PER_TOOL:
            del templates[min(templates, key=lambda each: _use(templates[each]))]
            self.num_templates -= 1
        templates[template] = rates
        self.num_templates += 1

    def add_tool(self, name: str, rates: Rates) -> None:
        """Add how often a tool was called."""
        self._tools[name] = Rates(dict(rates.items()), max_situations=_MAX_SITUATIONS_OF_TOOL)

    def tools(self) -> Iterator[tuple[str, Rates]]:
        """How often each tool was called."""
        yield from self._tools.items()

    def templates(self) -> Iterator[tuple[Template, TemplateRates]]:
        """All templates."""
        for templates in self._templates.values():
            yield from templates.items()


def _situations(conversation: Conversation, offered: Collection[str]) -> tuple[Situation, ...]:
    """Where a conversation stands: who spoke last, the last call, and the tools for which the user has said something
    that was not used yet."""
    role, name = conversation.last_role, conversation.last_name
    return (), (role,), (role, name), (role, name, "said", *sorted(offered))


def _situations_of_call(
    situations: tuple[Situation, ...], made: bool, fresh: bool
) -> tuple[tuple[Situation, ...], Situation]:
    """The same for a call: whether it was made before, and whether an argument came since the last answer."""
    return ((made, fresh), (made, fresh, *situations[1])), (made, fresh, *situations[-1])


def _is_said_by_user(template: Template) -> bool:
    """Whether its only source is what the user has said."""
    return not template.constants and len(template.sources) == 1 and template.sources[0].pool[:2] == ("text", "user")


def _use(rates: TemplateRates) -> float:
    return rates.follows.overall
