"""Makes a speculator of what the user gave: a short name, a framework's model, or the thing itself."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from typing import Any

from spectool_core.errors import ConfigurationError
from spectool_core.speculators.protocol import Speculator

__all__ = ["adopt"]

ENTRY_POINTS = "spectool.speculators"
"""Entry points of adapters: the name is a framework's root package, the object makes a speculator of its models."""

_ALLOWED = (
    '"openai:MODEL", an object with an async generator method `predict(prompt, tools)`, or a framework\'s chat model'
)


def adopt(given: Any) -> Speculator:
    """Return `given` as a speculator, or raise ConfigurationError.

    A chat model of a framework is wrapped by that framework's adapter, found by its entry point, so that the core
    imports no framework.
    """
    if isinstance(given, str):
        from spectool_core.speculators.model import speculator_from_string

        return speculator_from_string(given)
    if isinstance(given, type):
        raise ConfigurationError("speculators", given, f"an instance, not a class: {_ALLOWED}")
    frameworks = {cls.__module__.partition(".")[0] for cls in type(given).__mro__}
    for entry_point in entry_points(group=ENTRY_POINTS):
        if entry_point.name in frameworks:
            given = entry_point.load()(given)
    if not isinstance(given, Speculator) or not callable(given.predict) or inspect.iscoroutinefunction(given.predict):
        raise ConfigurationError("speculators", given, _ALLOWED)
    return given
