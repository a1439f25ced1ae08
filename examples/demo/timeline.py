"""A time line for the terminal: bars in lanes, one time axis for all charts. Pure functions, text out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

__all__ = ["BLOCKS", "Chart", "Kind", "Span", "Style", "timeline"]

Kind: TypeAlias = Literal["model", "speculator", "tool", "hit", "join", "wasted"]
"""What a bar is: a model generating, a speculator, or a tool run and what became of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar.

    Args:
        lane: the row's name; bars of a lane that overlap get rows of their own.
        label: written at the bar's left end where it fits.
        start_s: seconds on the charts' common axis.
        end_s: at least `start_s`.
        kind: decides glyph and colour.
    """

    lane: str
    label: str
    start_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Chart:
    """The lanes of one run, under a title; lanes come in the order in which they first appear."""

    title: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Style:
    """What the terminal can show.

    Args:
        width: columns.
        has_colour: ANSI colours are understood.
        has_unicode: block characters can be printed; else ASCII.
    """

    width: int = 100
    has_colour: bool = False
    has_unicode: bool = True


_MEANINGS: Mapping[Kind, str] = {
    "model": "main model",
    "speculator": "speculator",
    "tool": "tool, after the model asked",
    "hit": "run early: hit",
    "join": "run early: joined",
    "wasted": "run early: wasted",
}
BLOCKS: Mapping[Kind, str] = {
    "model": "█", "speculator": "▓", "tool": "▒", "hit": "━", "join": "═", "wasted": "\N{MULTIPLICATION SIGN}",
}  # fmt: skip
_LETTERS: Mapping[Kind, str] = {
    "model": "#", "speculator": "%", "tool": "-", "hit": "=", "join": "~", "wasted": "x",
}  # fmt: skip
_COLOURS: Mapping[Kind, int] = {
    "model": 34, "speculator": 36, "tool": 37, "hit": 32, "join": 33, "wasted": 31,
}  # fmt: skip

Cell: TypeAlias = tuple[str, Kind | None]
_EMPTY: Cell = (" ", None)
_MIN_TICK_COLUMNS = 8


@dataclass
class _Row:
    lane: str
    num_used: int = 0
    cells: list[Cell] = field(default_factory=list)


def timeline(charts: Sequence[Chart], style: Style) -> str:
    """Draw `charts` below one another on one axis, and a legend of the kinds that occur."""
    spans = [span for chart in charts for span in chart.spans]
    lane_width = max((len(name) for name in [*(s.lane for s in spans), *(c.title for c in charts)]), default=0) + 1
    num_columns = max(_MIN_TICK_COLUMNS, style.width - lane_width)
    end_s = max((span.end_s for span in spans), default=0.0) or 1.0
    scale = (num_columns - 1) / end_s
    lines: list[str] = []
    for chart in charts:
        lines += ["", f"{chart.title:<{lane_width}}{_axis(end_s, num_columns)}"]
        for row in _rows(chart.spans, scale, style):
            lines.append(f"{row.lane:<{lane_width}}{_text(row.cells, style)}".rstrip())
    lines += ["", *_legend([kind for kind in _MEANINGS if any(s.kind == kind for s in spans)], style)]
    return "\n".join(lines[1:])


def _axis(end_s: float, num_columns: int) -> str:
    scale = (num_columns - 1) / end_s
    step_s = _tick_step(_MIN_TICK_COLUMNS / scale)
    text = "0 s"
    for number in range(1, math.floor(end_s / step_s) + 1):
        longer = f"{text:<{round(number * step_s * scale)}}{number * step_s:.4g}"
        text = longer if len(longer) <= num_columns else text
    return text


def _tick_step(at_least_s: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(at_least_s))
    return next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= at_least_s)


def _rows(spans: Sequence[Span], scale: float, style: Style) -> list[_Row]:
    rows: list[_Row] = []
    for lane in dict.fromkeys(span.lane for span in spans):
        of_lane = [_Row(lane)]
        for span in sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start_s, s.end_s)):
            start = round(span.start_s * scale)
            row = next((row for row in of_lane if row.num_used <= start), None)
            if row is None:
                row = _Row("")
                of_lane.append(row)
            bar = _bar(span, max(1, round(span.end_s * scale) - start), style)
            row.cells += [_EMPTY] * (start - row.num_used) + bar
            row.num_used = start + len(bar)
        rows += of_lane
    return rows


def _bar(span: Span, num_columns: int, style: Style) -> list[Cell]:
    label = span.label if len(span.label) < num_columns else ""
    glyph = _glyphs(style)[span.kind]
    return [(character, span.kind) for character in label + glyph * (num_columns - len(label))]


def _glyphs(style: Style) -> Mapping[Kind, str]:
    return BLOCKS if style.has_unicode else _LETTERS


def _text(cells: Sequence[Cell], style: Style) -> str:
    return "".join(
        _coloured("".join(character for character, _ in run), kind, style)
        for kind, run in groupby(cells, key=lambda cell: cell[1])
    )


def _coloured(text: str, kind: Kind | None, style: Style) -> str:
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if style.has_colour and kind is not None else text


def _legend(kinds: Sequence[Kind], style: Style) -> Iterator[str]:
    """Break the legend into lines that fit."""
    line, num_columns = "", 0
    for kind in kinds:
        entry = f"{_glyphs(style)[kind] * 3} {_MEANINGS[kind]}   "
        if line and num_columns + len(entry.rstrip()) > style.width:
            yield line.rstrip()
            line, num_columns = "", 0
        line += _coloured(entry[:3], kind, style) + entry[3:]
        num_columns += len(entry)
    if line:
        yield line.rstrip()
