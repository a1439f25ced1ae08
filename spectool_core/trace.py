"""A record of events as JSON lines: written by a hook, read again by `spectool explain`.

It holds names, times and outcomes; never arguments, results or prompts, which no event carries.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from spectool_core.errors import ConfigurationError
from spectool_core.events import Event
from spectool_core.load import Load

__all__ = ["EventTrace", "read_trace"]

_VERSION = 1
_EVENTS = {event.__name__: event for event in get_args(Event)}


class EventTrace:
    """A hook that appends each event to a file.

    Args:
        path: the file; created, or emptied, when the trace is made.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lock = threading.Lock()
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open until `close`
        self._write({"spectool_trace": _VERSION})

    def __call__(self, event: Event) -> None:
        """Append one event."""
        self._write({"event": type(event).__name__, **asdict(event)})

    def close(self) -> None:
        """Write what is left and close the file; what comes later is dropped."""
        with self._lock:
            self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":"))
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")


def read_trace(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield the events of a trace, oldest first; a last line that was cut off is left out.

    Raises:
        ConfigurationError: naming the file and the line that is no event, or a version that is not known.
        OSError: the file cannot be read.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            entry = _entry(line)
            if number == 1:
                if entry.get("spectool_trace") != _VERSION:
                    raise ConfigurationError("trace", str(path), f"a trace of version {_VERSION}, from EventTrace")
                continue
            try:
                yield _event(entry)
            except (KeyError, TypeError) as exc:
                raise ConfigurationError(
                    "trace", f"{path}, line {number}", "one event as EventTrace writes it"
                ) from exc


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _event(entry: dict[str, Any]) -> Event:
    kind = _EVENTS[entry.pop("event")]
    if "load" in entry:
        entry["load"] = Load(**entry["load"])
    known = {field.name for field in fields(kind)}
    made: Event = kind(**{name: _frozen(value) for name, value in entry.items() if name in known})
    return made


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
