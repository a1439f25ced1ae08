"""The client's half of engine mode: model calls whose stream goes on inside the engine, and what the engine is told."""

from spectool_core.engine.client import EngineClient, engine_client
from spectool_core.engine.endpoint import EngineEndpoint
from spectool_core.engine.outputs import EngineTurn, asking

__all__ = ["EngineClient", "EngineEndpoint", "EngineTurn", "asking", "engine_client"]
