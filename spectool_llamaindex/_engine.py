"""Engine mode: an LLM whose requests the engine can go on from, and what a tool's output is in its message."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.llms.types import TextBlock
from llama_index.core.tools import ToolOutput

from spectool_core.engine import EngineClient
from spectool_core.identity import WeakIdentityMap

__all__ = ["through_engine", "content_of", "text_of"]

AgentT = TypeVar("AgentT", bound=BaseWorkflowAgent)

_logger = logging.getLogger("spectool")


@contextmanager
def through_engine(agent: AgentT, engine: EngineClient | None) -> Iterator[AgentT]:
    """For one step of `agent`: the agent, with a copy of its LLM whose HTTP client follows `engine`.

    It is another object, since other steps of the agent may be under way, and the user's LLM is what it is to have;
    what the step sets is set in `agent`. An agent whose LLM is not one over the openai package, or cannot be copied, is
    given itself.
    """
    stand_in = _stand_in(agent, engine) if engine is not None else None
    if stand_in is None:
        yield agent
        return
    given = stand_in.__dict__
    before = dict(given)
    try:
        yield stand_in
    finally:
        changed = {name: value for name, value in given.items() if name != "llm" and value is not before.get(name)}
        agent.__dict__.update(changed)


def _stand_in(agent: AgentT, engine: EngineClient) -> AgentT | None:
    try:
        llm = _followed(agent.llm, engine)
        if llm is agent.llm:
            return None
        stand_in = copy.copy(agent)
        stand_in.__dict__["llm"] = llm
        object.__setattr__(stand_in, "__pydantic_private__", agent.__pydantic_private__)
        return stand_in
    except Exception:  # classes of the user's own may do anything with their fields
        _logger.debug("%s cannot be copied", type(agent.llm).__name__, exc_info=True)
        return None


_clients: WeakIdentityMap[WeakKeyDictionary[asyncio.AbstractEventLoop, Any]] = WeakIdentityMap()


def _followed(llm: Any, engine: EngineClient) -> Any:
    # `OpenAI` and what derives from it; one that makes a client for each request would close it after the first turn.
    if not callable(getattr(llm, "_get_aclient", None)) or not getattr(llm, "reuse_client", False):
        return llm
    copied = copy.copy(llm)
    client = engine.adopt(getattr(llm, "_aclient", None) or _client_of(llm, copied))
    if client is None:
        return llm
    copied._aclient = client
    return copied


def _client_of(llm: Any, copied: Any) -> Any:
    """The client that `llm`, which has none yet, would make on this event loop."""
    loop = asyncio.get_running_loop()
    clients = _clients.get(llm) or _clients.set(llm, WeakKeyDictionary())
    if loop not in clients:
        clients[loop] = copied._get_aclient()
    return clients[loop]


def content_of(output: Any) -> str | None:
    """The content of the tool message that agents make of a tool's output; None where that is no text."""
    return text_of(output.blocks) if isinstance(output, ToolOutput) else None


def text_of(blocks: Sequence[Any]) -> str | None:
    """The content of a tool message of these blocks; None where that is no text."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return "".join(texts) if len(texts) == len(blocks) else None
