"""A fake of vLLM with spectool's plugin: a scripted model server whose answers go on inside the engine.

It keeps the HTTP contract and the rule of injection; tokens, templates and KV blocks it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spectool_core.testing.app import ChatApp
from spectool_core.testing.behaviour import EngineBehaviour
from spectool_core.testing.engine_app import EngineApp
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import Script
from spectool_core.testing.server import ModelServer
from spectool_core.testing.tally import Tally

__all__ = ["EngineServer", "FakeEngineStatistics"]


@dataclass(frozen=True, slots=True)
class FakeEngineStatistics:
    """What the engine did so far, besides answering chat requests.

    Args:
        num_responses: chat requests that asked for turns.
        num_posts: posts that were taken; they held `num_outputs`, `num_pending` and `num_withdrawn` entries.
        num_refused_posts: posts that were not.
        num_injected: turns after which the engine went on by itself.
        num_parked: turns that waited for an output.
        num_deleted: responses that their client ended.
    """

    num_responses: int = 0
    num_posts: int = 0
    num_outputs: int = 0
    num_pending: int = 0
    num_withdrawn: int = 0
    num_refused_posts: int = 0
    num_injected: int = 0
    num_parked: int = 0
    num_deleted: int = 0


class EngineServer(ModelServer):
    """Serves scripted models like `ModelServer`, with the plugin's routes and turns.

    Args:
        models: as for `ModelServer`. The script of a later turn is asked with the history that the engine went on from.
        behaviour: what is wrong with it; may be set while it serves.
        port: 0 takes a free one.
        max_num_logged: how many of the latest requests are kept in `requests`.
    """

    def __init__(
        self,
        models: Mapping[str, ScriptedModel | Script],
        behaviour: EngineBehaviour | None = None,
        *,
        port: int = 0,
        max_num_logged: int = 1000,
    ) -> None:
        super().__init__(models, port=port, max_num_logged=max_num_logged)
        self.behaviour = behaviour or EngineBehaviour()
        self._engine_tally = Tally(FakeEngineStatistics())

    def engine_statistics(self) -> FakeEngineStatistics:
        """The counts so far."""
        return self._engine_tally.value

    def wait_until_engine(
        self, predicate: Callable[[FakeEngineStatistics], bool], *, timeout_s: float = 10.0
    ) -> FakeEngineStatistics:
        """Block until `predicate(engine_statistics)` holds; raise TimeoutError after `timeout_s`."""
        return self._engine_tally.wait_until(predicate, timeout_s)

    async def until_engine(
        self, predicate: Callable[[FakeEngineStatistics], bool], *, timeout_s: float = 10.0
    ) -> FakeEngineStatistics:
        """Await what `wait_until_engine` blocks for."""
        return await self._engine_tally.until(predicate, timeout_s)

    def _app(self) -> ChatApp:
        return EngineApp(self, self._models, self._tally, self._log)

    def count(self, **changes: int) -> None:
        """Add to the counts."""
        self._engine_tally.update(
            lambda value: replace(value, **{name: getattr(value, name) + change for name, change in changes.items()})
        )
