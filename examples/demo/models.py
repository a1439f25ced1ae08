"""The two models of the demonstration: played back by a server on loopback, or real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from langchain_openai import ChatOpenAI
from openai import DefaultAsyncHttpxClient
from pydantic import SecretStr

from examples.demo.tasks import Task
from spectool_core.speculators import ModelSpeculator
from spectool_core.testing import Answer, ModelServer, ScriptedModel

__all__ = ["Endpoint", "Models", "playback"]

_GREETING = "Say only: ready."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model at an OpenAI-compatible endpoint; without `base_url`, at OpenAI."""

    model: str
    base_url: str | None
    api_key: str = field(repr=False)

    def chat(self, http: DefaultAsyncHttpxClient) -> ChatOpenAI:
        """A LangChain chat model that speaks through `http`."""
        key = SecretStr(self.api_key)
        return ChatOpenAI(model=self.model, base_url=self.base_url, api_key=key, http_async_client=http)


@dataclass(frozen=True, slots=True)
class Models:
    """The main model and the speculator."""

    main: Endpoint
    speculator: Endpoint

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[tuple[ChatOpenAI, ModelSpeculator]]:
        """Clients of both, each asked once: a wrong name or key shows here, and what is loaded late is loaded now.

        Raises:
            OpenAIError: a model does not answer.
        """
        small = self.speculator
        speculator = ModelSpeculator(small.model, base_url=small.base_url, api_key=small.api_key)
        async with DefaultAsyncHttpxClient() as http, aclosing(speculator):
            main = self.main.chat(http)
            for chat in (main, small.chat(http)):
                await chat.ainvoke(_GREETING)
            yield main, speculator


@asynccontextmanager
async def playback(tasks: Sequence[Task], *, main_s: float, speculator_s: float) -> AsyncIterator[Models]:
    """Serve both models from the tasks' scripts; their answers take `main_s` and about `speculator_s`."""
    scripts: Mapping[str, Mapping[str, Sequence[Answer]]] = {
        "main-model": {task.question: task.main_answers(main_s) for task in tasks},
        "speculator": {task.question: task.speculator_answers(speculator_s) for task in tasks},
    }
    ready = {_GREETING: Answer("Ready.")}
    async with ModelServer({name: ScriptedModel(ready | dict(script)) for name, script in scripts.items()}) as server:
        main, speculator = (Endpoint(name, server.base_url, "played-back") for name in scripts)
        yield Models(main, speculator)
