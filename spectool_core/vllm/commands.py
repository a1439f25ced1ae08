"""What the API server may ask of a scheduler with a tool cache, between two steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.v1.request import RequestStatus

from spectool_core.vllm.injection import Finish, Plan, continuation_or_finish
from spectool_core.vllm.scheduler import SchedulerStatistics, ToolCacheMixin
from spectool_core.vllm.turns import Response

__all__ = ["Commands"]


class Commands:
    """The commands by name; their arguments and results are plain values, since they cross processes.

    Args:
        scheduler: the engine core's.
    """

    def __init__(self, scheduler: ToolCacheMixin) -> None:
        self._scheduler = scheduler

    def announce(self, response_id: str, end_ids: list[int]) -> None:
        """A chat request is about to come that may be posted to, or has just come."""
        response = self._scheduler.tool_responses.announce(response_id, end_ids)
        if response.state == "early":
            self._scheduler.tool_begin_late(response_id)

    def plan(self, response_id: str, plan: dict[str, Any]) -> None:
        """Take a `Plan`."""
        response = self._scheduler.tool_responses.get(response_id)
        if response is not None and response.state != "finished":
            response.add(
                Plan(
                    keys=tuple(plan["keys"]),
                    call_ids=tuple(plan["call_ids"]),
                    suffix_ids=tuple(plan["suffix_ids"]),
                    turn=plan["turn"],
                    max_tokens=plan["max_tokens"],
                )
            )

    def expect(self, response_id: str, keys: list[str], turn: int | None) -> None:
        """The call keys that are cached or pending from now on; plans of others are dropped."""
        response = self._scheduler.tool_responses.get(response_id)
        if response is not None and response.state != "finished":
            response.expect(frozenset(keys), turn)

    def turns(self, response_id: str) -> list[dict[str, Any]]:
        """How each turn so far has ended; see `TurnRecord`."""
        response = self._scheduler.tool_responses.get(response_id)
        return [] if response is None else [asdict(record) for record in response.records]

    def resume(self, response_id: str, turn: int, suffix_ids: list[int], max_tokens: int | None) -> bool:
        """A parked sequence goes on by `suffix_ids`; False where it is not parked in this turn, or has no room."""
        response = self._scheduler.tool_responses.get(response_id)
        request = self._parked_request(response, turn)
        if response is None or request is None:
            return False
        num_left = request.max_tokens - request.num_output_tokens
        end = continuation_or_finish(
            suffix_ids,
            num_left if max_tokens is None else max_tokens,
            num_tokens=request.num_tokens,
            max_model_len=self._scheduler.max_model_len,
        )
        if isinstance(end, Finish):
            return False
        del self._scheduler.tool_parked[request.request_id]
        response.record("resumed", (), 0)
        self._scheduler.tool_go_on(request, end.continuation)
        self._scheduler.tool_statistics.num_resumed += 1
        return True

    def release(self, response_id: str, turn: int) -> bool:
        """A parked sequence ends as an ordinary tool call; its request is freed."""
        response = self._scheduler.tool_responses.get(response_id)
        request = self._parked_request(response, turn)
        if response is None or request is None:
            return False
        response.record("released", (), 0)
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._scheduler.tool_statistics.num_released += 1
        return True

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """The counts, and how many responses and parked sequences there are."""
        counts = asdict(self._scheduler.tool_statistics)
        if reset:
            self._scheduler.tool_statistics = SchedulerStatistics()
        return {
            **counts,
            "num_responses": len(self._scheduler.tool_responses),
            "num_parked_now": len(self._scheduler.tool_parked),
        }

    def level(self) -> str:
        """What this scheduler does of the levels in `settings`."""
        return "o2+o3" if self._scheduler.tool_num_draft_tokens else "o3"

    def _parked_request(self, response: Response | None, turn: int) -> Any:
        if response is None or response.state != "parked" or response.turn != turn:
            return None
        return self._scheduler.tool_parked.get(response.request_id or "")
