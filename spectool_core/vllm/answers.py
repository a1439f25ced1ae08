"""What vLLM's chat handler answered in one turn: the events as they are, and the message that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectool_core.vllm.formats.format import load
from spectool_core.vllm.rendering import Message

__all__ = ["AnswerMessage", "calls_of", "event_data"]

_DATA = "data: "


def event_data(event: str) -> dict[str, Any] | None:
    """The object of a server-sent event; None for `[DONE]` and comments."""
    text = event.strip()
    if not text.startswith(_DATA) or text == "data: [DONE]":
        return None
    data = json.loads(text.removeprefix(_DATA))
    return data if isinstance(data, dict) else None


class AnswerMessage:
    """The assistant message of the first choice, put together from chunks."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    @classmethod
    def of(cls, completion: Mapping[str, Any]) -> AnswerMessage:
        """Of an answer that was not streamed."""
        answer = cls()
        choice = completion["choices"][0]
        answer.finish_reason = choice.get("finish_reason")
        answer._add(choice["message"])
        return answer

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return bool(self._calls)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next chunk."""
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._add(choice.get("delta") or {})
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _add(self, delta: Mapping[str, Any]) -> None:
        if delta.get("content"):
            self._content.append(delta["content"])
        for place, piece in enumerate(delta.get("tool_calls") or ()):
            call = self._calls.setdefault(piece.get("index", place), {"id": "", "name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["id"] = piece.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def message(self) -> Message:
        """In OpenAI format, as a client would send it back."""
        content = "".join(self._content) or None
        if not self._calls:
            return {"role": "assistant", "content": content}
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"] or "{}"},
            }
            for _, call in sorted(self._calls.items())
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls}


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of an assistant message; None where there are none, or the arguments of one are no JSON object."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = load(call["function"]["arguments"])
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append((call["function"]["name"], arguments))
    return calls or None
