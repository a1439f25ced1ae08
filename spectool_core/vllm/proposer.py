"""A tool proposer for vLLM's workers that proposes nothing: the scheduler alone knows the cached calls."""

from __future__ import annotations

from typing import Any

__all__ = ["SilentProposer"]


class SilentProposer:
    """Switches the worker's verification of draft tokens on, for `--speculative-config '{"method": "custom_class"}'`.

    `propose` is not told which request a row belongs to and runs far from the tool cache, so the draft tokens are set
    by the scheduler instead; without a cached call there are none, and a step is an ordinary one.
    """

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """No draft tokens, for each of the batch's rows."""
        del args, kwargs
        return [[] for _ in sampled_token_ids]
