"""The two models of the demonstration: played back by a server on loopback, or real ones."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import DefaultAsyncHttpxClient

from examples.demo.tasks import Task
from spectool_core.speculators import ModelSpeculator
from spectool_core.testing import Answer, ModelServer, ScriptedModel

if TYPE_CHECKING:
    from examples.demo.frameworks import Framework

__all__ = ["Endpoint", "Models", "playback"]

_GREETING = "Say only: ready."
_MAIN_MODEL = "gpt-4o-mini"
"""What the played-back main model is called: LlamaIndex's `OpenAI` takes only names that it knows."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model at an OpenAI-compatible endpoint; without `base_url`, at OpenAI."""

    model: str
    base_url: str | None
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Models:
    """The main model and the speculator."""

    main: Endpoint
    speculator: Endpoint

    @asynccontextmanager
    async def ready(self, framework: Framework) -> AsyncIterator[tuple[Any, ModelSpeculator]]:
        """The framework's own main model and the speculator, for use.

        Both models were asked once: a wrong name or key shows here, and what is loaded late is loaded now.

        Raises:
            OpenAIError: a model does not answer.
        """
        small = self.speculator
        speculator = ModelSpeculator(small.model, base_url=small.base_url, api_key=small.api_key)
        async with DefaultAsyncHttpxClient() as http, aclosing(speculator):
            main = framework.model(self.main, http)
            for model in (main, framework.model(small, http)):
                await framework.ask(model, _GREETING)
            gc.collect()  # else it falls into one of the runs, and takes tenths of a second after so many imports
            yield main, speculator


@asynccontextmanager
async def playback(tasks: Sequence[Task], *, main_s: float, speculator_s: float) -> AsyncIterator[Models]:
    """Serve both models from the tasks' scripts; their answers take `main_s` and about `speculator_s`."""
    scripts: Mapping[str, Mapping[str, Sequence[Answer]]] = {
        _MAIN_MODEL: {task.question: task.main_answers(main_s) for task in tasks},
        "speculator": {task.question: task.speculator_answers(speculator_s) for task in tasks},
    }
    ready = {_GREETING: Answer("Ready.")}
    async with ModelServer({name: ScriptedModel(ready | dict(script)) for name, script in scripts.items()}) as server:
        main, speculator = (Endpoint(name, server.base_url, "played-back") for name in scripts)
        yield Models(main, speculator)
