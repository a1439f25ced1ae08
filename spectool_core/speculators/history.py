"""A speculator that learns from the history of conversations what the main model calls next; it asks no model."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from spectool_core.calls import Message, Prompt, ToolCall, ToolSchema
from spectool_core.errors import ConfigurationError
from spectool_core.speculators._history_conversations import Conversations
from spectool_core.speculators._history_file import read_knowledge, write_knowledge
from spectool_core.speculators._history_knowledge import Knowledge
from spectool_core.speculators.prediction import Prediction

__all__ = ["HistorySpeculator", "HistoryStatistics"]

_SHARED = ""


@dataclass(frozen=True, slots=True)
class HistoryStatistics:
    """What a `HistorySpeculator` has learned and done so far.

    Args:
        num_predictions: calls that it has predicted.
        num_answers: answers of the main model that it has learned from.
        num_calls: calls in these answers.
        num_templates: ways to make up a call that it holds at present, of all tenants.
        num_conversations: conversations that it can follow on from where they were.
        num_tenants: tenants for which it holds anything.
    """

    num_predictions: int = 0
    num_answers: int = 0
    num_calls: int = 0
    num_templates: int = 0
    num_conversations: int = 0
    num_tenants: int = 0


class HistorySpeculator:
    """Predicts from what followed what in earlier prompts, and from where the arguments came.

    It learns from each prompt that it is asked about: all earlier answers of the main model are in it. Each answer is
    learned once, when the prompt after it arrives. The probability of a prediction is how often calls made up in this
    way, in situations like this, were in the very next answer, which may as well have been text. Thread-safe; memory is
    bounded whatever it is asked.

    Args:
        path: a file to begin with, if it exists, and to `save` to; None keeps everything in memory.
        tenant: `tenant(prompt)` names whose prompt this is; nothing learned of one tenant is used for another. It is
            called in the context in which the turn began, so it may return what a context variable holds. None, or an
            exception, and the prompt is left alone. Without it all prompts are of one tenant.
        tools: names of those that may be run early; others are not predicted, which saves time. None for all.
        max_predictions: calls predicted in a turn.
        min_probability: how probable a call must be to be predicted at all.
        max_conversations: conversations of one tenant that are followed without reading their prompts anew.
        max_tenants: tenants whose knowledge is kept; the one that has been away for longest is forgotten first.
        name: what events call this speculator.

    Raises:
        ConfigurationError: naming the field, the value and what is allowed; for a file its line, and what is wrong.
    """

    cpu_s = 0.001
    uses_model = False
    num_first_turns = 100  # it begins with nothing, and learns from what it is asked

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        tenant: Callable[[Prompt], str | None] | None = None,
        tools: Iterable[str] | None = None,
        max_predictions: int = 3,
        min_probability: float = 0.05,
        max_conversations: int = 64,
        max_tenants: int = 128,
        name: str = "history",
    ) -> None:
        _require(tenant is None or callable(tenant), "tenant", tenant, "None or a function of a prompt")
        for field, count in (
            ("max_predictions", max_predictions),
            ("max_conversations", max_conversations),
            ("max_tenants", max_tenants),
        ):
            _require(_is_count(count), field, count, "an integer of at least 1")
        _require(_is_probability(min_probability), "min_probability", min_probability, "a number from 0 to 1")
        _require(isinstance(name, str) and bool(name), "name", name, "some text")
        self.name = name
        self._path = None if path is None else _checked_path(path)
        self._tenant = tenant
        _require(tools is None or not isinstance(tools, str), "tools", tools, "None or names of tools")
        self._tools = None if tools is None else frozenset(tools)
        self._max_predictions = max_predictions
        self._min_probability = min_probability
        self._max_conversations = max_conversations
        self._lock = threading.Lock()
        self._tenants: LRUCache[str, _Tenant] = LRUCache(max_tenants)
        self._num_predictions = 0
        if self._path is not None and self._path.exists():
            for of, knowledge in read_knowledge(self._path, self._tools).items():
                self._tenants[of] = _Tenant(knowledge, max_conversations)

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Yield the most probable calls of `tools`, the most probable first; see `Speculator`."""
        for prediction in self._predictions(prompt, tools):
            yield prediction

    def learn(self, messages: Sequence[Message], *, tenant: str = _SHARED) -> None:
        """Learn from a recorded conversation in OpenAI format, as a whole.

        A conversation learned twice counts twice; of one that this speculator has been asked about, only what was
        added since is learned.
        """
        with self._lock:
            self._of(tenant).conversations.learn(messages)

    def forget(self, *, tenant: str | None = None) -> None:
        """Forget everything, or everything of one tenant; a file stays as it is until the next `save`."""
        with self._lock:
            if tenant is None:
                self._tenants.clear()
            else:
                self._tenants.pop(tenant, None)

    def save(self) -> None:
        """Replace the file by one with all that is known now.

        Raises:
            ConfigurationError: there is no `path`.
            OSError: the file cannot be written; the old one is still there.
        """
        if self._path is None:
            raise ConfigurationError("path", None, "a file to save to")
        with self._lock:
            write_knowledge(self._path, {name: tenant.knowledge for name, tenant in self._tenants.items()})

    def statistics(self) -> HistoryStatistics:
        """Count what has been learned and predicted."""
        with self._lock:
            tenants = list(self._tenants.values())
            return HistoryStatistics(
                num_predictions=self._num_predictions,
                num_answers=sum(each.knowledge.num_answers for each in tenants),
                num_calls=sum(each.knowledge.num_calls for each in tenants),
                num_templates=sum(each.knowledge.num_templates for each in tenants),
                num_conversations=sum(len(each.conversations) for each in tenants),
                num_tenants=len(tenants),
            )

    def _predictions(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> list[Prediction]:
        name = _SHARED if self._tenant is None else self._tenant(prompt)
        names = {_name_of(schema) for schema in tools}
        if not isinstance(name, str) or not names:
            return []
        messages = prompt.messages
        with self._lock:
            tenant = self._of(name)
            forecast = tenant.conversations.ask(messages, names, prompt.read_text)
            predictions = tenant.knowledge.predictions(
                forecast, max_predictions=self._max_predictions, min_probability=self._min_probability
            )
            self._num_predictions += len(predictions)
        return predictions

    def _of(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(Knowledge(tools=self._tools), self._max_conversations)
        return tenant


class _Tenant:
    """What belongs to one tenant alone."""

    def __init__(self, knowledge: Knowledge, max_conversations: int) -> None:
        self.knowledge = knowledge
        self.conversations = Conversations(knowledge, max_conversations)


def _name_of(schema: ToolSchema) -> str:
    function = schema.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else ""


def _checked_path(path: Any) -> Path:
    _require(isinstance(path, (str, os.PathLike)) and bool(os.fspath(path)), "path", path, "None or the path of a file")
    checked = Path(path)
    _require(checked.parent.is_dir() and not checked.is_dir(), "path", str(path), "a file in a folder that exists")
    return checked


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1


def _require(condition: bool, field: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigurationError(field, value, allowed)
