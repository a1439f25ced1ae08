"""OpenAI's chat-completions objects, made from timelines: pure functions without clock or network."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spectool_core.testing.faults import DroppedConnection, EmptyChoices, Hang, HttpError, TruncatedAnswer
from spectool_core.testing.latch import Latch
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import ChatRequest
from spectool_core.testing.timeline import Timeline, digest_of

__all__ = ["Generation", "TimedChunk", "error_body"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """One `chat.completion.chunk` and the seconds after the request at which it is due."""

    due_s: float
    chunk: Mapping[str, Any]


class Generation:
    """The whole answer to one request, all choices side by side.

    The prompt's tokens are a quarter of the characters of its messages and tools as compact JSON, rounded up; cached
    are those of the messages before the last assistant message, which the previous turn's request already held.

    Args:
        request: what was asked.
        model: who answers.

    Raises:
        ScriptEndedError: the script says nothing to this request.
    """

    def __init__(self, request: ChatRequest, model: ScriptedModel) -> None:
        digest = digest_of(request)
        self.request = request
        self.choices = [
            Timeline(answer, model, digest if choice == 0 else f"{digest}_{choice}_")
            for choice, answer in enumerate(model.answers(request))
        ]
        self.fault = next((c.answer.fault for c in self.choices if c.answer.fault is not None), None)
        self.num_prompt_tokens, self.num_cached_tokens = _prompt_tokens(request)
        self.id = f"chatcmpl-{digest}"
        self._created = int(time.time())

    @property
    def generation_s(self) -> float:
        """Seconds from the request to the last token of the slowest choice."""
        return max(choice.generation_s for choice in self.choices)

    @property
    def sent_choices(self) -> Sequence[Timeline]:
        """The choices that the client gets to see: none, where that is the fault."""
        return [] if isinstance(self.fault, EmptyChoices) else self.choices

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def latches(self) -> Sequence[Latch]:
        """The latches that hold back the answer."""
        return [choice.answer.latch for choice in self.choices if choice.answer.latch is not None]

    @property
    def is_cut(self) -> bool:
        """Whether a fault ends the answer half way."""
        return isinstance(self.fault, DroppedConnection | TruncatedAnswer | Hang)

    def sent(self, pieces: Sequence[T]) -> Sequence[T]:
        """Give those of the answer's pieces that the client gets: all, or the first half if a fault cuts it."""
        return pieces[: max(1, len(pieces) // 2)] if self.is_cut else pieces

    def num_tokens_at(self, elapsed_s: float) -> int:
        """Count the completion tokens of all choices that are generated `elapsed_s` after the request."""
        return sum(choice.num_tokens_at(elapsed_s) for choice in self.choices)

    def tokens_read(self) -> dict[str, int]:
        """Give what the request adds to `ModelStatistics` when its prompt is read; an HTTP error reads nothing."""
        if isinstance(self.fault, HttpError):
            return {}
        return {"num_prompt_tokens": self.num_prompt_tokens, "num_cached_tokens": self.num_cached_tokens}

    def outcome(self) -> dict[str, int]:
        """Give what the request adds to `ModelStatistics` when it is played to its end."""
        if self.fault is not None:
            return {"num_failed_requests": 1}
        return {
            "num_completed_requests": 1,
            "num_completion_tokens": sum(choice.num_completion_tokens for choice in self.choices),
            "num_reasoning_tokens": self.num_reasoning_tokens,
            "num_tool_calls": sum(len(choice.answer.tool_calls) for choice in self.choices),
        }

    def usage(self) -> dict[str, Any]:
        """Give the usage of the whole answer."""
        num_completion_tokens = sum(choice.num_completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def completion(self) -> dict[str, Any]:
        """Give the answer as one `chat.completion`."""
        choices = [
            {"index": index, "message": choice.message(), "logprobs": None, "finish_reason": choice.finish_reason}
            for index, choice in enumerate(self.sent_choices)
        ]
        return {
            **self._envelope("chat.completion"),
            "choices": choices,
            "usage": self.usage(),
        }

    def chunks(self) -> Sequence[TimedChunk]:
        """Give the answer as chunks in the order of their times; the last one carries usage where it was asked for."""
        chunks = sorted(self._choice_chunks(), key=lambda timed: timed.due_s)
        options = self.request.body.get("stream_options") or {}
        if options.get("include_usage") or not chunks:
            usage = {"usage": self.usage()} if options.get("include_usage") else {}
            chunks.append(TimedChunk(self.generation_s, self._chunk([], **usage)))
        return chunks

    def _choice_chunks(self) -> Iterator[TimedChunk]:
        for index, timeline in enumerate(self.sent_choices):
            for delta in timeline.deltas():
                yield TimedChunk(delta.due_s, self._chunk([_choice(index, delta.content, None)]))
            yield TimedChunk(timeline.generation_s, self._chunk([_choice(index, {}, timeline.finish_reason)]))

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **fields: Any) -> Mapping[str, Any]:
        return {**self._envelope("chat.completion.chunk"), "choices": choices, **fields}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.request.model}


def error_body(message: str, kind: str) -> dict[str, Any]:
    """Give an error object in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _choice(index: int, delta: Mapping[str, Any], finish_reason: str | None) -> Mapping[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _prompt_tokens(request: ChatRequest) -> tuple[int, int]:
    roles = [message.get("role") for message in request.messages]
    num_cached = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else 0
    tools = _num_characters(request.tools) if request.tools else 0
    cached = tools + _num_characters(request.messages[:num_cached])
    rest = _num_characters(request.messages[num_cached:])
    return -(-(cached + rest) // 4), cached // 4 if num_cached else 0


def _num_characters(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str))
