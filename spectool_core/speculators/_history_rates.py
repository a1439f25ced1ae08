"""Rates with memory of what is recent: of events in situations, and of probabilities that came true."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

__all__ = ["Calibration", "Rate", "Rates", "Situation"]

Rate: TypeAlias = tuple[float, float]
"""How often it came true, of how often it was tried; what is long ago counts less."""

Situation: TypeAlias = tuple[bool | str, ...]

_DECAY = 0.99
_WEIGHT = 3.0

_NUM_BINS = 20
_BIN_DECAY = 0.998
_BIN_WEIGHT = 8.0
_NUM_ALIKE = 4


class Rates:
    """How often something came true, by situation.

    Args:
        rates: of an earlier time.
        max_situations: how many are kept; the one that has not come up for longest is forgotten first.
    """

    def __init__(self, rates: Mapping[Situation, Rate] | None = None, *, max_situations: int = 32) -> None:
        self._rates: dict[Situation, Rate] = dict(rates or {})
        self._max_situations = max_situations

    def probability(self, situations: Sequence[Situation], before: float) -> float:
        """How often it comes true in the last of `situations`, given from general to special.

        Each rate is drawn to the one before, the more so the less often it was tried.

        Args:
            situations: the present one, from general to special.
            before: what to expect where nothing was tried.
        """
        value = before
        for situation in situations:
            rate = self._rates.get(situation)
            if rate is not None:
                value = (rate[0] + _WEIGHT * value) / (rate[1] + _WEIGHT)
        return value

    def add(self, situations: Sequence[Situation], *, right: bool) -> None:
        """It was tried in these situations."""
        for situation in situations:
            num_right, num = self._rates.pop(situation, (0.0, 0.0))
            self._rates[situation] = num_right * _DECAY + right, num * _DECAY + 1
        while len(self._rates) > self._max_situations:
            del self._rates[next(iter(self._rates))]

    @property
    def overall(self) -> float:
        """How often it came true in all situations; low where little is known."""
        num_right = sum(rate[0] for rate in self._rates.values())
        return num_right / (1 + sum(rate[1] for rate in self._rates.values()))

    def items(self) -> Sequence[tuple[Situation, Rate]]:
        """All rates."""
        return list(self._rates.items())


class Calibration:
    """Corrects probabilities by how often those like them came true; what was more probable stays so.

    It errs on the side of caution: a run for nothing costs more than one that is missed.

    Args:
        bins: rates of equal steps from 0 to 1; None for no experience.
    """

    num_bins = _NUM_BINS

    def __init__(self, bins: Sequence[Rate] | None = None) -> None:
        self._bins: list[Rate] = list(bins or [(0.0, 0.0)] * _NUM_BINS)
        self._fitted: list[float] | None = None

    def corrected(self, probability: float) -> float:
        """What `probability` has meant so far."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted[_bin(probability)]

    def add(self, probability: float, *, right: bool) -> None:
        """A call held so probable was in the answer, or was not."""
        num_right, num = self._bins[_bin(probability)]
        self._bins[_bin(probability)] = num_right * _BIN_DECAY + right, num * _BIN_DECAY + 1
        self._fitted = None

    def bins(self) -> Sequence[Rate]:
        """The rates of all bins."""
        return list(self._bins)

    def _fit(self) -> list[float]:
        """The rates of all bins; neighbours in the wrong order are put together (isotonic regression)."""
        blocks: list[tuple[float, float, int]] = []
        for number, (num_right, num) in enumerate(self._bins):
            block = num_right + _BIN_WEIGHT * (number + 0.5) / _NUM_BINS, num + _BIN_WEIGHT, 1
            while blocks and blocks[-1][0] * block[1] > block[0] * blocks[-1][1]:
                last = blocks.pop()
                block = last[0] + block[0], last[1] + block[1], last[2] + block[2]
            blocks.append(block)
        cautious = [_cautious(num_right / num, num) for num_right, num, width in blocks for _ in range(width)]
        return list(accumulate(cautious, max))


def _cautious(share: float, num: float) -> float:
    """A share less one standard error; conversations that are alike tell as much as one of them."""
    return max(0.0, share - math.sqrt(share * (1 - share) * _NUM_ALIKE / num))


def _bin(probability: float) -> int:
    return min(_NUM_BINS - 1, int(probability * _NUM_BINS))
