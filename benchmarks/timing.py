"""How long a piece of code takes."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from statistics import median
from typing import Any

__all__ = ["microseconds"]


def microseconds(function: Callable[[], Any], number: int) -> float:
    """Median of seven repeats, for one call."""
    return median(timeit.repeat(function, number=number, repeat=7)) / number * 1e6
