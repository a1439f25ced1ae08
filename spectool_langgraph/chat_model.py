"""For graphs that call the model in their own way: a chat model told by hand which tools it may call."""

from __future__ import annotations

from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableBinding

from spectool_core.errors import ConfigurationError
from spectool_langgraph._callback import FOLLOWER, SpeculativeTools
from spectool_langgraph._engine import follow_model
from spectool_langgraph.tool_node import SpeculativeToolNode

__all__ = ["SpeculationCallback", "speculative_model"]

ModelT = TypeVar("ModelT")


class SpeculationCallback(BaseCallbackHandler):
    """Starts a turn for the tools of `node` whenever the chat model that it is given to is called inside a graph.

    Not needed where `node` was added to the same graph as the model's node; needed where it is called from within
    another node's function. Give it to one model (`callbacks=[...]`), not to a whole run.

    Raises:
        ConfigurationError: `node` is not a `SpeculativeToolNode`.
    """

    run_inline = True

    def __init__(self, node: SpeculativeToolNode) -> None:
        if not isinstance(node, SpeculativeTools):
            raise ConfigurationError("node", node, "a SpeculativeToolNode")
        self._node = node

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        **kwargs: Any,
    ) -> None:
        """The main model is asked: start a turn."""
        params = kwargs.get("invocation_params") or {}
        FOLLOWER.start_turns(run_id, messages[0], params, explicit=self._node.enlisted)


def speculative_model(model: ModelT, node: SpeculativeToolNode) -> ModelT:
    """A copy of a chat model, or of one with bound tools, whose calls start turns for the tools of `node`.

    The copy is of the same class and differs in its `callbacks` only. In engine mode its HTTP clients, which are the
    model's, get a transport of ours before their own.

    Raises:
        ConfigurationError: `model` is neither a chat model nor a binding of one, or `node` not a SpeculativeToolNode.
    """
    if isinstance(model, RunnableBinding):
        bound = speculative_model(model.bound, node)
        return cast("ModelT", model.model_copy(update={"bound": bound}))
    if not isinstance(model, BaseChatModel):
        raise ConfigurationError("model", model, "a chat model, or a chat model with bound tools")
    callback = SpeculationCallback(node)
    present = model.callbacks
    if isinstance(present, BaseCallbackManager):
        callbacks: Any = present.copy()
        callbacks.add_handler(callback, inherit=False)
    else:
        callbacks = [*(present or ()), callback]
    follow_model(model, node.enlisted.speculation.engine)
    return cast("ModelT", model.model_copy(update={"callbacks": callbacks}))
