"""What vLLM's chat handler answered in one turn: the events as they are, and the message that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectool_core.vllm.formats.format import load_json
from spectool_core.vllm.rendering import Message
from spectool_core.vllm.turns import keys_of
from spectool_core.vllm.wire import DONE

__all__ = ["AnswerMessage", "calls_of", "event_data", "single_pieces"]

_DATA = "data: "


def event_data(event: str) -> dict[str, Any] | None:
    """The object of a server-sent event; None for `[DONE]` and comments."""
    text = event.strip()
    if not text.startswith(_DATA) or text == _DATA + DONE:
        return None
    data = json.loads(text.removeprefix(_DATA))
    return data if isinstance(data, dict) else None


def single_pieces(chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chunk whose delta holds several pieces of calls as several chunks of one each, the last with the end.

    vLLM puts them into one delta where many tokens come at a time, as accepted drafts do. Clients that know one token
    at a time read the first alone (llama_index/llms/openai/utils.py, update_tool_calls).
    """
    choices = list(chunk.get("choices") or ())
    delta = choices[0].get("delta") or {} if len(choices) == 1 else {}
    pieces = delta.get("tool_calls") or ()
    if len(pieces) < 2:
        return [dict(chunk)]
    of_tokens = {name: empty for name, empty in _OF_TOKENS.items() if choices[0].get(name)}
    of_end = {name: choices[0][name] for name in _OF_END if name in choices[0]}
    middle = {name: value for name, value in choices[0].items() if name not in of_end} | {"finish_reason": None}
    deltas = [{**delta, "tool_calls": list(pieces[:1])}, *({"tool_calls": [piece]} for piece in pieces[1:])]
    parts = [{**middle, **(of_tokens if number else {}), "delta": part} for number, part in enumerate(deltas)]
    parts[-1].update(of_end)
    return [{**chunk, "choices": [part]} for part in parts]


_OF_TOKENS: dict[str, Any] = {"logprobs": None, "token_ids": []}
"""What a choice tells of its tokens, which the first of several pieces brings, and what the others say of none."""

_OF_END = ("finish_reason", "stop_reason")


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

    def as_dict(self) -> Message:
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
    """The calls of an assistant message; None where there are none, or the arguments of one are no JSON object.

    Neither are those that have no key, such as half of a surrogate pair.
    """
    calls: list[tuple[str, dict[str, Any]]] = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = load_json(call["function"]["arguments"])
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append((call["function"]["name"], arguments))
    return None if keys_of(calls) is None else calls or None
