"""How long a piece of code takes."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from statistics import median
from typing import Any

__all__ = ["microseconds"]


def microseconds(function: Callable[[], Any], number: int) -> float:
    """CPU time of one call, the median of seven repeats."""
    return median(timeit.repeat(function, timer=time.thread_time, number=number, repeat=7)) / number * 1e6
