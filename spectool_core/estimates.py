"""Running estimates of what changes while it is measured: means, shares and differences. Pure."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Differences", "RunningMean", "Share"]

_JUMP = 1.5


class RunningMean:
    """An exponentially weighted mean, plain while young, that follows a jump at once.

    Two values in a row, both beyond `_JUMP` times the mean on the same side, begin it anew: what is measured has
    changed.

    Args:
        weight: of the newest value, once there are more than 1 / weight.
    """

    __slots__ = ("_count", "_odd", "_weight", "value")

    def __init__(self, weight: float = 0.2) -> None:
        self.value: float | None = None
        self._weight = weight
        self._count = 0
        self._odd: float | None = None

    def add(self, value: float) -> None:
        """Take the next value into account."""
        if self.value is None:
            self.value, self._count = value, 1
            return
        side = _side(value, self.value)
        if side and self._odd is not None and _side(self._odd, self.value) == side:
            self.value, self._count, self._odd = (self._odd + value) / 2, 2, None
            return
        self._odd = value if side else None
        self._count += 1
        self.value += max(self._weight, 1 / self._count) * (value - self.value)


def _side(value: float, mean: float) -> int:
    if value > _JUMP * mean:
        return 1
    return -1 if value * _JUMP < mean else 0


class Share:
    """How often a trial succeeds: the larger of two Beta posteriors, whose evidence fades at two speeds.

    The slow one bears with a run of failures that is mere chance, the quick one soon believes in an improvement; it
    errs on the side of hope, which costs little where success is worth anything.
    """

    __slots__ = ("_quick", "_slow", "num_trials")

    def __init__(self) -> None:
        self._slow = _Posterior(fading=0.95)
        self._quick = _Posterior(fading=0.8)
        self.num_trials = 0

    def add(self, *, success: bool) -> None:
        """Take one more trial into account."""
        self._slow.add(success=success)
        self._quick.add(success=success)
        self.num_trials += 1

    @property
    def mean(self) -> float:
        """The share that is held likely."""
        return max(self._slow.mean, self._quick.mean)


class _Posterior:
    """Beta posterior from a flat prior; each trial, and the prior, weighs `fading` times the next one."""

    __slots__ = ("_fading", "_num_failures", "_num_successes")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self._num_successes = self._num_failures = 1.0

    def add(self, *, success: bool) -> None:
        self._num_successes = self._num_successes * self._fading + success
        self._num_failures = self._num_failures * self._fading + (not success)

    @property
    def mean(self) -> float:
        return self._num_successes / (self._num_successes + self._num_failures)


class Differences:
    """The last few differences between two conditions that were measured one right after the other."""

    __slots__ = ("_last",)

    def __init__(self, num_kept: int = 6) -> None:
        self._last: deque[float] = deque(maxlen=num_kept)

    def __len__(self) -> int:
        return len(self._last)

    def add(self, difference: float) -> None:
        """Take one more difference into account."""
        self._last.append(difference)

    @property
    def at_least(self) -> float:
        """What the difference is at least, by one and a half standard errors; 0 unless there is evidence for more."""
        count = len(self._last)
        if count < 2:
            return 0.0
        mean = sum(self._last) / count
        variance = sum((each - mean) ** 2 for each in self._last) / (count - 1)
        return max(0.0, mean - 1.5 * math.sqrt(variance / count))
