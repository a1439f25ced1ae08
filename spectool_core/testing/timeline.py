"""When each piece of an answer is due: a scripted answer laid out in time, as deltas in OpenAI's format."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import Answer, ChatRequest, ScriptedCall

__all__ = ["Delta", "Timeline", "digest_of", "num_tokens_of"]

T = TypeVar("T")


def num_tokens_of(text: str) -> int:
    """Count tokens by the rule of this package: one for every four characters begun."""
    return math.ceil(len(text) / 4)


def digest_of(request: ChatRequest) -> str:
    """Name a request by its model and history: equal requests, equal names."""
    history = json.dumps([request.model, request.messages], separators=(",", ":"), default=str)
    return hashlib.blake2b(history.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a streamed answer.

    Args:
        due_s: seconds after the request at which its last token is generated.
        content: the `delta` object of the chunk.
        completes_call: the position of the call that this piece completes; None if it completes none.
    """

    due_s: float
    content: Mapping[str, Any]
    completes_call: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece before its time is known: how many tokens it takes."""

    num_tokens: float
    content: Mapping[str, Any]
    completes_call: int | None = None


class Timeline:
    """One choice of an answer, laid out in time.

    Args:
        answer: what is said.
        model: whose pace, quirks and defaults hold.
        digest: what stable call ids are derived from.
    """

    def __init__(self, answer: Answer, model: ScriptedModel, digest: str) -> None:
        self.answer = answer
        self.quirks = model.quirks
        self.num_reasoning_tokens = _first(answer.reasoning_tokens, model.reasoning_tokens)
        self.calls = [
            replace(call, id=self._call_id(call, position, digest)) for position, call in enumerate(answer.tool_calls)
        ]
        self.first_token_s = _first(answer.time_to_first_token_s, model.time_to_first_token_s)
        self.num_completion_tokens = _first(answer.completion_tokens, self._num_natural_tokens())
        self.generation_s = self._generation_s(model)
        self._max_num_deltas = model.max_num_deltas

    @property
    def finish_reason(self) -> str:
        """The choice's finish reason."""
        return self.answer.finish_reason or ("tool_calls" if self.answer.tool_calls else "stop")

    def num_tokens_at(self, elapsed_s: float) -> int:
        """Count the completion tokens generated `elapsed_s` after the request."""
        if elapsed_s >= self.generation_s:
            return self.num_completion_tokens
        if elapsed_s <= self.first_token_s:
            return 0
        share = (elapsed_s - self.first_token_s) / (self.generation_s - self.first_token_s)
        return int(self.num_completion_tokens * share)

    def message(self) -> dict[str, Any]:
        """Give the whole answer as an assistant message in OpenAI format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.text or None}
        if self.num_reasoning_tokens:
            message["reasoning_content"] = _reasoning(self.num_reasoning_tokens)
        if self.answer.tool_calls:
            message["tool_calls"] = [
                {**_head(call), "function": {"name": call.name, "arguments": call.text}} for call in self.calls
            ]
        return message

    def deltas(self) -> list[Delta]:
        """Give the answer in at most about `max_num_deltas` pieces, each due when its last token is generated."""
        parts = list(self._parts())
        total = sum(part.num_tokens for part in parts)
        start_s = min(self.first_token_s, self.generation_s)
        deltas = [Delta(start_s, {"role": "assistant", "content": ""})]
        num_done = 0.0
        for part in parts:
            num_done += part.num_tokens
            # The last piece is due at the end exactly, whatever the rounding.
            share = num_done / total if num_done < total else 1.0
            due_s = self.generation_s if share == 1.0 else start_s + (self.generation_s - start_s) * share
            deltas.append(Delta(due_s, part.content, part.completes_call))
        return deltas

    def _num_natural_tokens(self) -> int:
        calls = sum(num_tokens_of(call.name) + num_tokens_of(call.text) for call in self.answer.tool_calls)
        return self.num_reasoning_tokens + num_tokens_of(self.answer.text) + calls

    def _generation_s(self, model: ScriptedModel) -> float:
        by_token = self.answer.seconds_per_token
        # An answer's own pace overrides the model's total, not its own.
        total_s = (
            self.answer.generation_s if by_token is not None else _first(self.answer.generation_s, model.generation_s)
        )
        if total_s is not None:
            return total_s
        return self.first_token_s + self.num_completion_tokens * _first(by_token, model.seconds_per_token)

    def _parts(self) -> Iterator[_Part]:
        share = self._max_num_deltas / max(1, self._num_natural_tokens())
        if self.num_reasoning_tokens:
            for piece in _split(_reasoning(self.num_reasoning_tokens), share * self.num_reasoning_tokens):
                yield _Part(len(piece) / 4, {"reasoning_content": piece})
        for piece in _split(self.answer.text, share * num_tokens_of(self.answer.text)):
            yield _Part(len(piece) / 4, {"content": piece})
        for position, call in enumerate(self.calls):
            yield from self._call_parts(position, call, share)

    def _call_parts(self, position: int, call: ScriptedCall, share: float) -> Iterator[_Part]:
        pieces = self._pieces(call, share)
        head = _head(call)
        if self.quirks.call_deltas == "separate":
            last = None if pieces else position
            yield _Part(
                len(call.name) / 4, self._call_delta(position, head, {"name": call.name, "arguments": ""}), last
            )
        else:
            first, pieces = "".join(pieces[:1]), pieces[1:]
            last = None if pieces else position
            content = self._call_delta(position, head, {"name": call.name, "arguments": first})
            yield _Part((len(call.name) + len(first)) / 4, content, last)
        for number, piece in enumerate(pieces, 1):
            last = position if number == len(pieces) else None
            yield _Part(len(piece) / 4, self._call_delta(position, {}, {"arguments": piece}), last)

    def _pieces(self, call: ScriptedCall, share: float) -> Sequence[str]:
        if self.quirks.call_deltas == "whole":
            return [call.text]
        if isinstance(call.arguments, tuple):
            return call.arguments
        return _split(call.text, share * num_tokens_of(call.text))

    def _call_delta(self, position: int, head: Mapping[str, Any], function: Mapping[str, str]) -> Mapping[str, Any]:
        index = {"given": {"index": position}, "shared": {"index": 0}, "missing": {}}[self.quirks.call_indices]
        return {"tool_calls": [{**index, **head, "function": function}]}

    def _call_id(self, call: ScriptedCall, position: int, digest: str) -> str | None:
        if call.id is not None:
            return call.id
        match self.quirks.call_ids:
            case "stable":
                return f"call_{digest}{position}"
            case "unique":
                return f"call_{uuid.uuid4().hex}"
            case "repeating":
                return f"call_{position}"
            case "missing":
                return None


def _first(value: T | None, default: T) -> T:
    return default if value is None else value


def _head(call: ScriptedCall) -> dict[str, Any]:
    return {"type": "function"} if call.id is None else {"id": call.id, "type": "function"}


def _reasoning(num_tokens: int) -> str:
    # Four characters a token, as everywhere in this package.
    return "hmm " * num_tokens


def _split(text: str, num_pieces: float) -> list[str]:
    """Cut `text` into about `num_pieces` non-empty pieces of equal length; no piece where it is empty."""
    count = min(len(text), max(1, int(num_pieces)))
    return [text[len(text) * i // count : len(text) * (i + 1) // count] for i in range(count)]
