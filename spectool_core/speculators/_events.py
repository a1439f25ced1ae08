"""Server-sent events, as far as chat completions use them: the data of each event."""

from __future__ import annotations

__all__ = ["EventLines"]


class EventLines:
    """Splits a byte stream into the data of its events (WHATWG HTML, 9.2.6); an unfinished event is never given."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytearray] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the data of the events that they end."""
        self._rest += data
        if b"\n" not in data:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
