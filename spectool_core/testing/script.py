"""What scripted models say: requests, answers, and the rules that choose one for the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from spectool_core.calls import Message, ToolSchema
from spectool_core.errors import ConfigurationError, SpectoolError
from spectool_core.testing.faults import Fault
from spectool_core.testing.latch import Latch

__all__ = ["Answer", "ChatRequest", "Flaky", "Script", "ScriptEndedError", "ScriptedCall", "script_of"]


class ScriptEndedError(SpectoolError, LookupError):
    """A script was asked for a task or a turn that it does not hold."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a script decides from: one chat-completions request, and which of its `n` choices is wanted.

    Args:
        model: the model's name as the client wrote it.
        messages: the history in OpenAI format.
        tools: the tools in OpenAI format.
        n: how many choices the client asked for.
        choice: which of them this is, from 0.
        stream: whether the client asked for a stream.
        body: the whole parsed body.
        headers: the HTTP headers, names in lower case; empty without HTTP.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    n: int = 1
    choice: int = 0
    stream: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def turn(self) -> int:
        """How many assistant messages the history holds."""
        return sum(message.get("role") == "assistant" for message in self.messages)

    @property
    def task(self) -> str:
        """The text of the first user message, which stands for the conversation; empty if there is none."""
        for message in self.messages:
            if message.get("role") == "user":
                return _text(message.get("content"))
        return ""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One tool call of a scripted answer.

    Args:
        name: the tool's name.
        arguments: a mapping is sent as JSON; text is sent as it is, well-formed or not; a tuple of texts is sent
            in exactly these pieces when streamed.
        id: the call's id; None leaves it to the model's `Quirks`.
    """

    name: str
    arguments: Mapping[str, Any] | str | tuple[str, ...] = field(default_factory=dict)
    id: str | None = None

    @property
    def text(self) -> str:
        """The arguments as the client receives them."""
        if isinstance(self.arguments, str):
            return self.arguments
        if isinstance(self.arguments, tuple):
            return "".join(self.arguments)
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a model: text, tool calls, or both, or a fault.

    Times that are None are the model's. Without `generation_s` an answer takes `time_to_first_token_s` plus
    `seconds_per_token` for every completion token.

    Args:
        text: the content.
        tool_calls: the calls, in order.
        reasoning_tokens: tokens generated before the rest, streamed as `reasoning_content`; None is the model's.
        completion_tokens: all generated tokens, reasoning included; None counts one for every four characters of
            the text, names and arguments, and adds the reasoning.
        generation_s: seconds from request to last token.
        time_to_first_token_s: seconds before the first token begins.
        seconds_per_token: seconds for each token.
        finish_reason: None is "tool_calls" where there are calls, else "stop".
        fault: what happens instead.
        latch: the answer begins when this latch is open.
    """

    text: str = ""
    tool_calls: Sequence[ScriptedCall] = ()
    reasoning_tokens: int | None = None
    completion_tokens: int | None = None
    generation_s: float | None = None
    time_to_first_token_s: float | None = None
    seconds_per_token: float | None = None
    finish_reason: str | None = None
    fault: Fault | None = None
    latch: Latch | None = None

    def __post_init__(self) -> None:
        for name in ("reasoning_tokens", "completion_tokens", *_TIMES):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(name, value, "None or a number of at least 0")


_TIMES = ("generation_s", "time_to_first_token_s", "seconds_per_token")

Rule: TypeAlias = Callable[[ChatRequest], Answer]
Script: TypeAlias = Answer | Sequence[Answer] | Mapping[str, Answer | Sequence[Answer]] | Rule
"""One answer for every turn; or the answers of turns 0, 1, ...; or either by task; or any function of the request."""


def script_of(script: Script) -> Rule:
    """Give any script as a function of the request, which raises ScriptEndedError where the script says nothing."""
    if isinstance(script, Answer):
        return lambda _request: script
    if isinstance(script, Mapping):
        return _by_task({task: script_of(answers) for task, answers in script.items()})
    if isinstance(script, Sequence):
        return _by_turn(tuple(script))
    if callable(script):
        return script
    raise ConfigurationError("script", script, "an Answer, a sequence or mapping of them, or a function")


class Flaky:
    """A script that fails at first: `fault` for the first `num_times` requests, then `script`."""

    def __init__(self, script: Script, fault: Fault, *, num_times: int = 1) -> None:
        self._rule = script_of(script)
        self._fault = fault
        self._num_left = num_times
        self._lock = threading.Lock()

    def __call__(self, request: ChatRequest) -> Answer:
        """Answer one request."""
        with self._lock:
            if self._num_left > 0:
                self._num_left -= 1
                return Answer(fault=self._fault)
        return self._rule(request)


def _by_turn(answers: tuple[Answer, ...]) -> Rule:
    def answer(request: ChatRequest) -> Answer:
        if request.turn >= len(answers):
            raise ScriptEndedError(
                f"the script of task {request.task!r} has no turn {request.turn}: it ends after {len(answers)}"
            )
        return answers[request.turn]

    return answer


def _by_task(rules: Mapping[str, Rule]) -> Rule:
    def answer(request: ChatRequest) -> Answer:
        rule = rules.get(request.task)
        if rule is None:
            raise ScriptEndedError(f"the script holds no task {request.task!r}; it holds {sorted(rules)}")
        return rule(request)

    return answer


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return ""
