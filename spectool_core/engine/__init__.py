"""The client's half of engine mode: model calls whose stream goes on inside the engine, and what the engine is told."""

from spectool_core.engine.client import EngineClient, engine_client
from spectool_core.engine.current import set_current_turn
from spectool_core.engine.endpoint import EngineEndpoint
from spectool_core.engine.openai_clients import follow
from spectool_core.engine.turn import EngineTurn

__all__ = ["EngineClient", "EngineEndpoint", "EngineTurn", "engine_client", "follow", "set_current_turn"]
