"""What a client is sent: every turn, where it asks for turns; else the last turn, and what was injected before it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from spectool_core.vllm.tool_cache import Injected
from spectool_core.vllm.turn_serving import ResidentResponse, TurnAnswer
from spectool_core.vllm.wire import DONE_EVENT, INJECTED_EVENT, TURN_EVENT, server_sent_event

__all__ = ["completion_of_last_turn", "events_of_last_turn", "events_of_turns"]


async def events_of_turns(
    response: ResidentResponse, answer: TurnAnswer, error_data: Callable[[Exception], str]
) -> AsyncIterator[str]:
    """Each turn as vLLM would stream it, its end, and what the engine went on from.

    Args:
        response: the response.
        answer: its first turn.
        error_data: how vLLM writes an error into a stream.
    """
    try:
        while True:
            async for event, _ in answer.events():
                yield event
            if answer.has_failed:
                break
            if answer.completion is not None:
                yield server_sent_event(answer.completion)
            over = {"turn": answer.number, "finish_reason": answer.message.finish_reason}
            yield server_sent_event(over, TURN_EVENT)
            following = await response.go_on(answer)
            if following is None:
                break
            injection, next_answer = following
            injected = [call.as_dict() for call in injection.injected]
            went_on = {"turn": answer.number, "injected": injected, "messages": injection.messages}
            yield server_sent_event(went_on, INJECTED_EVENT)
            answer = next_answer
    except Exception as exc:
        yield f"data: {error_data(exc)}\n\n"
    yield DONE_EVENT


async def events_of_last_turn(
    response: ResidentResponse, answer: TurnAnswer, response_id: str, error_data: Callable[[Exception], str]
) -> AsyncIterator[str]:
    """One stream under the first turn's id; what belongs to a call is held back until it is known who runs it.

    Text that the model writes before an injected call has been sent when the call begins.
    """
    injected: list[Injected] = []
    model = ""
    try:
        while True:
            held: list[str] = []
            async for event, data in answer.events():
                model = data.get("model", model) if data else model
                shown = event if answer.number == 1 or data is None else _continued(data, response_id)
                held.append(shown)
                if _is_shown(data) and not answer.message.has_calls:
                    for known in held:
                        yield known
                    held = []
            following = await response.go_on(answer)
            if following is None:
                break
            injected += following[0].injected
            answer = following[1]
        for known in held:
            yield known
        if injected:
            yield server_sent_event(_injected_chunk(response_id, model, injected))
    except Exception as exc:
        yield f"data: {error_data(exc)}\n\n"
    yield DONE_EVENT


async def completion_of_last_turn(response: ResidentResponse, answer: TurnAnswer, response_id: str) -> dict[str, Any]:
    """The last turn's completion under the first turn's id, with the list `injected` if there is one."""
    injected: list[Injected] = []
    while True:
        async for _ in answer.events():
            raise TypeError("vLLM streams where no stream was asked for")
        following = await response.go_on(answer)
        if following is None:
            break
        injected += following[0].injected
        answer = following[1]
    completion = {**(answer.completion or {}), "id": response_id}
    return {**completion, "injected": [call.as_dict() for call in injected]} if injected else completion


def _is_shown(chunk: dict[str, Any] | None) -> bool:
    """Whether a chunk holds more than tokens that may begin a call."""
    deltas = [choice.get("delta") or {} for choice in (chunk or {}).get("choices") or ()]
    return any(delta.get("content") or delta.get("reasoning") or delta.get("role") for delta in deltas)


def _continued(chunk: dict[str, Any], response_id: str) -> str:
    """A later turn's chunk as one of the first's; empty for the chunk that only opens the message."""
    choices = chunk.get("choices")
    if choices and choices[0].get("delta") == {"role": "assistant", "content": ""} and not choices[0]["finish_reason"]:
        return ""
    return server_sent_event({**chunk, "id": response_id})


def _injected_chunk(response_id: str, model: str, injected: list[Injected]) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": [],
        "injected": [call.as_dict() for call in injected],
    }
