"""Every exception that spectool raises on purpose.

SpectoolError
├── ConfigurationError (ValueError)       a field was given a value that is not allowed; raised at construction
│   └── NotSpeculatableError              a marked tool cannot be run early, and why
├── CanonicalizationError (ValueError)    arguments have no canonical key: the call is not speculated
└── MissingExtraError (ImportError)       an optional dependency is absent; the message names the extra

None of them is raised while an agent runs: at run time speculation never adds an error to the user's run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = [
    "CanonicalizationError",
    "ConfigurationError",
    "MissingExtraError",
    "NotSpeculatableError",
    "SpectoolError",
]


class SpectoolError(Exception):
    """Base of all errors raised by spectool."""


class ConfigurationError(SpectoolError, ValueError):
    """A field was given a value that is not allowed.

    Args:
        field: the field or parameter, as the user wrote it.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}={value!r} is not allowed; allowed: {allowed}")

    @staticmethod
    def of(error: ValidationError, given: Mapping[str, Any], fields: Iterable[str]) -> ConfigurationError:
        """The first thing that pydantic finds wrong with settings.

        Args:
            error: pydantic's.
            given: the settings, by name, as messages may show them.
            fields: the settings that there are.
        """
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            allowed = "one of the settings " + ", ".join(fields)
        else:
            allowed = first["msg"].removeprefix("Input should be ")
        return ConfigurationError(field, given.get(field), allowed)


class NotSpeculatableError(ConfigurationError):
    """A tool was marked `@speculatable` that cannot be run early.

    Args:
        tool: the tool's name.
        reason: why it cannot be run before the main model asks for it.
    """

    def __init__(self, tool: str, reason: str) -> None:
        self.tool = tool
        self.reason = reason
        super().__init__("tool", tool, f"a tool that can be run early; this one {reason}")


class CanonicalizationError(SpectoolError, ValueError):
    """Arguments hold a value that has no canonical form (NaN, an unknown object), so the call has no key."""


class MissingExtraError(SpectoolError, ImportError):
    """An optional dependency is not installed.

    Args:
        module: the module that could not be imported.
        extra: the extra of the `spectool` distribution that installs it.
    """

    def __init__(self, module: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{module} is not installed; install it with: pip install 'spectool[{extra}]'")
