"""Whether this vLLM has the hooks that engine mode stands on; `scheduler_cls` is declared non-public by vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectool_core.errors import SpectoolError

__all__ = ["MissingHookError", "check_hooks", "scheduler_hooks"]

SCHEDULER_METHODS = (
    "_free_request",
    "_free_request_blocks",
    "_handle_stopped_request",
    "_request_blocks_can_be_freed",
    "_update_request_with_output",
    "add_request",
    "finish_requests",
    "reset_prefix_cache",
    "schedule",
)
SCHEDULER_ATTRIBUTES = (
    "encoder_cache_manager",
    "kv_cache_manager",
    "max_model_len",
    "max_num_running_reqs",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "requests",
    "running",
    "vllm_config",
)


class MissingHookError(SpectoolError):
    """This version of vLLM lacks something that engine mode stands on.

    Args:
        version: vLLM's version.
        hook: what is missing.
        advice: what works without it.
    """

    def __init__(self, version: str, hook: str, advice: str) -> None:
        self.version = version
        self.hook = hook
        super().__init__(f"vLLM {version} has no {hook}, which engine mode needs; {advice}")


def check_hooks(owners: Mapping[str, tuple[Any, Sequence[str]]], version: str, advice: str) -> None:
    """Check that each owner has the attributes that are named with it.

    Args:
        owners: by the names that a message calls them.
        version: vLLM's.
        advice: what works without the attributes.

    Raises:
        MissingHookError: naming vLLM's version and the first that is missing.
    """
    for name, (owner, attributes) in owners.items():
        for attribute in attributes:
            if not hasattr(owner, attribute):
                raise MissingHookError(version, f"{name}.{attribute}", advice)


def scheduler_hooks(scheduler: Any, status: Any) -> Mapping[str, tuple[Any, Sequence[str]]]:
    """What a scheduler with a tool cache needs of vLLM: its own methods and attributes, and a status of requests."""
    return {
        "Scheduler": (scheduler, (*SCHEDULER_METHODS, *SCHEDULER_ATTRIBUTES)),
        "KVCacheManager": (getattr(scheduler, "kv_cache_manager", None), ("allocate_slots",)),
        "RequestStatus": (status, ("WAITING_FOR_STREAMING_REQ",)),
    }
