"""vLLM's schedulers with a tool cache: injection at the end of a turn, parking, and draft tokens for cached calls.

A mixin over the stock schedulers (vllm/v1/core/sched/scheduler.py), which keep all decisions on batches and blocks. At
the end token of a turn, `_update_request_with_output` decides; the stock path for a request that stopped but goes on
(`_handle_stopped_request`, made for streaming input) drops what is in flight and keeps the KV blocks; then the
request's tokens are extended and it waits to be scheduled like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.formats import tool_format
from spectool_core.vllm.hooks import check_hooks, scheduler_hooks
from spectool_core.vllm.injection import (
    Continuation,
    Finish,
    Inject,
    Park,
    TurnEnd,
    computed_frontier,
    turn_end,
)
from spectool_core.vllm.settings import EngineSettings
from spectool_core.vllm.turns import Response, Responses, keys_of, response_ids_of
from spectool_core.vllm.wire import RefusalReason

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as StockMethods
else:
    StockMethods = object

__all__ = [
    "AsyncToolScheduler",
    "SchedulerStatistics",
    "ToolCacheMixin",
    "ToolScheduler",
    "tool_scheduler",
    "why_not_extendable",
]


@dataclass(slots=True)
class SchedulerStatistics:
    """Raw counts since the engine core started, or since they were last reset."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_injections: int = 0
    num_injected_tokens: int = 0
    num_parked: int = 0
    num_resumed: int = 0
    num_released: int = 0
    num_yielded: int = 0


class ToolCacheMixin(StockMethods):
    """What both schedulers have in common."""

    # State and what others call begin with `tool_`: the object also holds vLLM's members, and each version adds some.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        advice = "the level 'sessions' needs no scheduler"
        check_hooks(scheduler_hooks(self, RequestStatus), vllm.__version__, advice)
        settings = EngineSettings.of(self.vllm_config.additional_config)
        self.tool_statistics = SchedulerStatistics()
        self.tool_responses = Responses(settings.max_responses)
        self._tool_format = tool_format(settings.tool_format)
        self._tool_tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        self._tool_start_ids = tuple(self._tool_format.start_ids(self._tool_tokenizer))
        self.tool_num_draft_tokens = self._num_draft_tokens(settings)
        # A parked sequence holds one of the worker's slots.
        self._tool_max_parked = min(settings.max_parked, self.max_num_running_reqs // 2)
        self.tool_parked: dict[str, Any] = {}  # request id -> request, the longest parked first
        self._tool_resumed: dict[str, Any] = {}  # those that go on and have not been scheduled yet
        self._tool_ends: dict[str, TurnEnd] = {}
        self._tool_drafted: dict[str, int] = {}
        self._stock_allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def _num_draft_tokens(self, settings: EngineSettings) -> int:
        if settings.level != "o2+o3":
            return 0
        if isinstance(self, AsyncScheduler):  # whose draft tokens stay in the worker
            raise ConfigurationError("scheduler_cls", type(self).__name__, "ToolScheduler, for the level o2+o3")
        if not self.num_spec_tokens:
            raise ConfigurationError("speculative_config", None, "the tool proposer, for the level o2+o3")
        return min(settings.num_draft_tokens, int(self.num_spec_tokens))

    # Requests come and go

    def add_request(self, request: Any) -> None:
        """A request comes; it has a tool cache if it was announced and can be extended at all."""
        super().add_request(request)
        self._tool_begin(request)

    def tool_begin_late(self, response_id: str) -> None:
        """The announcement of a response has been overtaken by its request."""
        for request_id, request in self.requests.items():
            if response_id in response_ids_of(request_id):
                self._tool_begin(request)
                break

    def _tool_begin(self, request: Any) -> None:
        response = self.tool_responses.begin(request.request_id)
        if response is not None and (reason := why_not_extendable(request)) is not None:
            response.record("finished", (), 0, reason)
            self.tool_responses.end(request.request_id)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        for kept in (self.tool_parked, self._tool_resumed, self._tool_ends, self._tool_drafted):
            kept.pop(request_id, None)
        self.tool_responses.end(request_id)
        return super()._free_request(request, *args, **kwargs)

    # Steps

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the stock scheduler, with draft tokens where a cached call has begun."""
        self._tool_drafted.clear()
        if self.tool_num_draft_tokens:
            self._set_draft_tokens()
        output = super().schedule(*args, **kwargs)
        for request_id in [known for known in self._tool_resumed if known in output.num_scheduled_tokens]:
            del self._tool_resumed[request_id]
        if output.total_num_scheduled_tokens:
            self.tool_statistics.num_steps += 1
            self.tool_statistics.num_scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _set_draft_tokens(self) -> None:
        for response in self.tool_responses.running():
            if not response.plans or response.state != "running":
                continue
            request = self.requests.get(response.request_id)
            # Only a sequence all of whose tokens but the last are computed decodes in the coming step.
            if (
                request is None
                or request.status != RequestStatus.RUNNING
                or request.num_computed_tokens + 1 != request.num_tokens
            ):
                continue
            room = self.max_model_len - request.num_tokens - 1
            room = min(room, request.max_tokens - request.num_output_tokens - 1, self.tool_num_draft_tokens)
            tokens = response.draft(request.output_token_ids, self._tool_start_ids, room) if room > 0 else []
            if tokens:
                request.spec_token_ids = tokens
                self._tool_drafted[request.request_id] = len(tokens)
                self.tool_statistics.num_draft_tokens += len(tokens)

    # The end of a turn

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        was_running = request.status == RequestStatus.RUNNING
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if request.request_id in self._tool_drafted:
            self.tool_statistics.num_accepted_tokens += max(0, len(new_token_ids) - 1)
        # What a preempted request brings late is stale: it is out of the running queue already.
        if stopped and was_running and (response := self.tool_responses.of_request(request.request_id)) is not None:
            end = self._turn_end(request, response)
            if not isinstance(end, Finish):
                self._tool_ends[request.request_id] = end
                request.status = RequestStatus.WAITING  # so that no finish is reported
                request.stop_reason = None
        return new_token_ids, stopped

    def _turn_end(self, request: Any, response: Response) -> TurnEnd:
        output = list(request.output_token_ids)
        keys: tuple[str, ...] = ()
        end: TurnEnd
        if request.status != RequestStatus.FINISHED_STOPPED or output[-1] not in response.end_ids:
            end = Finish("stopped_otherwise")
        elif not response.has_posts:
            end = Finish("nothing_cached")  # looking for calls would decode the whole output
        elif not (keys := self._keys_in(output)):
            end = Finish("no_calls")
        else:
            end = turn_end(
                keys,
                response.current_plans(),
                response.currently_expected(),
                num_tokens=request.num_tokens,
                num_left=request.max_tokens - len(output),
                max_model_len=self.max_model_len,
                may_park=len(self.tool_parked) < self._tool_max_parked,
            )
        match end:
            case Inject():
                response.record("injected", keys, len(output))
            case Park():
                response.record("parked", keys, len(output))
            case Finish(reason):
                response.record("finished", keys, len(output), reason)
        return end

    def _keys_in(self, output: Sequence[int]) -> tuple[str, ...]:
        calls = self._tool_format.read_calls(output, self._tool_tokenizer)
        return (keys_of(calls) if calls else None) or ()

    def _handle_stopped_request(self, request: Any) -> bool:
        end = self._tool_ends.pop(request.request_id, None)
        if end is None:
            return bool(super()._handle_stopped_request(request))
        placeholders = request.num_output_placeholders
        frontier = computed_frontier(request.num_computed_tokens, placeholders, request.num_tokens)
        request.num_computed_tokens = frontier + placeholders
        # As a session that waits for input, which keeps its KV blocks.
        request.resumable, request.streaming_queue = True, None
        try:
            super()._handle_stopped_request(request)
        finally:
            request.resumable = False
        if isinstance(end, Inject):
            self.tool_go_on(request, end.continuation)
            self.tool_statistics.num_injections += 1
        else:
            self.tool_parked[request.request_id] = request
            response = self.tool_responses.of_request(request.request_id)
            if response is not None:
                response.state = "parked"
            self.tool_statistics.num_parked += 1
        return False

    def tool_go_on(self, request: Any, continuation: Continuation) -> None:
        """Extend a request that waits for input; all its tokens so far become its prompt."""
        num_written = request.num_output_tokens
        request._all_token_ids.extend(continuation.suffix_ids)
        request.prompt_token_ids = list(request._all_token_ids)
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request._output_token_ids.clear()
        request.update_block_hashes()
        params = request.sampling_params.clone()
        if continuation.max_tokens == request.max_tokens - num_written:
            params.min_tokens = max(0, params.min_tokens - num_written)
        params.max_tokens = request.max_tokens = continuation.max_tokens
        request.sampling_params = params
        request.status = RequestStatus.WAITING
        self.num_waiting_for_streaming_input -= 1
        self._tool_resumed[request.request_id] = request
        self.tool_statistics.num_injected_tokens += len(continuation.suffix_ids)
        response = self.tool_responses.of_request(request.request_id)
        if response is not None:
            response.next_turn()

    # KV pressure

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The stock allocation; parked sequences are the first to give their blocks."""
        while (blocks := self._stock_allocate_slots(request, *args, **kwargs)) is None:
            if not self._yield_blocks(request):
                return None
        return blocks

    def _yield_blocks(self, request: Any) -> bool:
        # Where nothing runs, sequences that go on could wait for each other's blocks for ever.
        candidates = [*self.tool_parked.values(), *(() if self.running else self._tool_resumed.values())]
        return any(candidate is not request and self._yields(candidate) for candidate in candidates)

    def _yields(self, candidate: Any) -> bool:
        """Take the blocks of a sequence that waits; False where it has none, or they may still be written."""
        if not candidate.num_computed_tokens or not self._request_blocks_can_be_freed(candidate):
            return False
        self._free_request_blocks(candidate)
        self.encoder_cache_manager.free(candidate)
        candidate.num_computed_tokens = 0
        self.tool_statistics.num_yielded += 1
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """The stock reset, which fails while anything holds blocks; sequences that wait give theirs as running ones."""
        if reset_running_requests:
            for waiting in (*self.tool_parked.values(), *self._tool_resumed.values()):
                self._yields(waiting)
        return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))


def why_not_extendable(request: Any) -> RefusalReason | None:
    """Why the engine cannot extend a request; None if it can.

    `turn_client.why_not_resident` looks at the chat request, which this process does not see; here stands what would
    break the scheduler, whoever announced the response.
    """
    params = request.sampling_params
    if params is None or request.resumable:
        return "no_generation"
    if request.structured_output_request is not None:
        return "structured_output"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "several_samples" if params.n > 1 else None


class ToolScheduler(ToolCacheMixin, Scheduler):
    """The plain scheduler with a tool cache; needed for draft tokens."""


class AsyncToolScheduler(ToolCacheMixin, AsyncScheduler):
    """The asynchronous scheduler, which prepares a step while the one before runs, with a tool cache."""


def tool_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> ToolCacheMixin:
    """The scheduler with a tool cache that fits the configuration, for `--scheduler-cls`."""
    scheduler = AsyncToolScheduler if vllm_config.scheduler_config.async_scheduling else ToolScheduler
    return scheduler(*args, vllm_config=vllm_config, **kwargs)
