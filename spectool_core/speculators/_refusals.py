"""What an endpoint means by refusing a request: when to come back, and which option it does not know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

__all__ = ["refused_option", "retry_after_s"]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a 429 or 503 asks the client to wait (RFC 9110, 10.2.3); None where it does not say.

    `retry-after-ms`, OpenAI's finer form, goes first. A date is read against the answer's own Date.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        until, now = (parsedate_to_datetime(headers.get(name, "")) for name in ("Retry-After", "Date"))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return None


def refused_option(body: bytes, options: Collection[str]) -> str | None:
    """The one of `options`, all sent, that a 400 or 422 complains of; None where it complains of something else.

    An error that names no field is blamed on `n`, which the fewest servers know.
    """
    text = body.decode(errors="replace")
    for option in options:
        if re.search(rf"""["'`]{re.escape(option)}["'`]""", text):
            return option
    return "n" if "n" in options and _named_field(text) is None else None


def _named_field(text: str) -> str | None:
    try:
        answer: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    field = error.get("param") if isinstance(error, dict) else None
    return field if isinstance(field, str) else None
