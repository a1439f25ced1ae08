"""What was measured, beside what the paper predicts: numbers in, a table out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectool_core.model import run_standard_time, run_time

__all__ = ["Measurement", "Prices", "table"]


@dataclass(frozen=True, slots=True)
class Prices:
    """The speculator's prices in dollars for a million tokens."""

    prompt: float
    completion: float

    def cost(self, num_prompt_tokens: int, num_completion_tokens: int) -> float:
        """What these tokens cost, in dollars."""
        return (num_prompt_tokens * self.prompt + num_completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One task, run stock and speculative.

    Args:
        title: the task's.
        num_turns: turns with tool calls; a final turn without one follows them.
        num_calls: the main model's calls of marked tools.
        num_hits: those of them that were served from early runs, finished or joined.
        num_hit_turns: turns whose every call was served so; only these save time.
        num_wasted: early runs that served no call.
        stock_s: seconds of the stock run.
        speculative_s: seconds of the speculative run.
        generation_s: G, the mean time of the main model in the stock run.
        speculator_s: g, the mean time of the speculator.
        tool_s: T, the mean over turns of the slowest tool in the stock run.
        num_prompt_tokens: read by the speculator.
        num_completion_tokens: written by the speculator.
    """

    title: str
    num_turns: int
    num_calls: int
    num_hits: int
    num_hit_turns: int
    num_wasted: int
    stock_s: float
    speculative_s: float
    generation_s: float
    speculator_s: float
    tool_s: float
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def predicted_stock_s(self) -> float:
        """N (G + T) and a last G."""
        return run_standard_time(self.num_turns, generation_s=self.generation_s, tool_s=self.tool_s)

    @property
    def predicted_s(self) -> float:
        """The paper's equation (1) with the hits that came true, and a last G."""
        return run_time(
            self.num_turns,
            self.num_hit_turns,
            generation_s=self.generation_s,
            speculator_s=self.speculator_s,
            tool_s=self.tool_s,
        )


_ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_COLUMNS = (
    ("", "task"),
    ("tool", "turns"),
    ("", "hits"),
    ("", _ALPHA),
    ("wasted", "runs"),
    ("stock", "s"),
    ("spec.", "s"),
    ("time", "saved"),
    ("by the", "paper"),
    ("spec.", "tokens"),
    ("spec.", "cost $"),
)


def table(measurements: Sequence[Measurement], prices: Prices) -> str:
    """Lay the measurements out, one line for each and one for all of them; at most 80 columns for short titles."""
    rows = [_row(one.title, [one], prices) for one in measurements] + [_row("all", measurements, prices)]
    heads = [tuple(column[line] for column in _COLUMNS) for line in (0, 1)]
    widths = [max(len(row[column]) for row in (*heads, *rows)) for column in range(len(_COLUMNS))]
    rule = "-" * (sum(widths) + len(widths) - 1)
    lines = [*(_line(head, widths) for head in heads), rule, *(_line(row, widths) for row in rows)]
    return "\n".join([*lines[:-1], rule, lines[-1]])


def _row(title: str, group: Sequence[Measurement], prices: Prices) -> tuple[str, ...]:
    num_calls, num_hits = sum(one.num_calls for one in group), sum(one.num_hits for one in group)
    stock_s, speculative_s = sum(one.stock_s for one in group), sum(one.speculative_s for one in group)
    predicted = _saved(sum(one.predicted_stock_s for one in group), sum(one.predicted_s for one in group))
    num_tokens = [sum(one.num_prompt_tokens for one in group), sum(one.num_completion_tokens for one in group)]
    return (
        title,
        str(sum(one.num_turns for one in group)),
        f"{num_hits}/{num_calls}",
        f"{num_hits / num_calls:.2f}" if num_calls else "-",
        str(sum(one.num_wasted for one in group)),
        f"{stock_s:.2f}",
        f"{speculative_s:.2f}",
        _saved(stock_s, speculative_s),
        predicted,
        str(sum(num_tokens)),
        f"{prices.cost(*num_tokens):.5f}",
    )


def _saved(before_s: float, after_s: float) -> str:
    return f"{100 * (before_s - after_s) / before_s:.1f} %" if before_s > 0 else "-"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        f"{cell:<{width}}" if number == 0 else f"{cell:>{width}}"
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return " ".join([first, *others]).rstrip()
