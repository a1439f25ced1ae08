"""The entry points by which vLLM finds the plugin; nothing of vLLM is imported before it asks."""

from __future__ import annotations

from typing import Any

__all__ = ["endpoint_plugin", "register"]


def register() -> None:
    """The engine core's half; entry point `vllm.general_plugins`, called in each of vLLM's processes."""
    from vllm.v1.engine.core import EngineCore

    from spectool_core.vllm.core_method import install

    install(EngineCore)


def endpoint_plugin() -> Any:
    """The API server's half; entry point `vllm.endpoint_plugins`."""
    from spectool_core.vllm.endpoint import ToolCacheEndpoint

    return ToolCacheEndpoint()
