"""What the demonstration prints: paragraphs, and a line for each call as its turn ends."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

from examples.demo.agent import AgentRun
from examples.demo.timeline import BLOCKS, Style
from examples.demo.turns import Call, Turn

__all__ = ["Screen", "terminal_style"]


_PLAIN = {ord("\N{GREEK SMALL LETTER ALPHA}"): "a", ord("\N{PER MILLE SIGN}"): "/1000"}


class Screen:
    """Standard output, `style.width` columns wide."""

    def __init__(self, style: Style) -> None:
        self.style = style

    def say(self, text: str = "", *, indent: str = "") -> None:
        """Print a paragraph."""
        lines = textwrap.wrap(
            text, self.style.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        self.draw("\n".join(lines))

    def draw(self, text: str) -> None:
        """Print lines as they are."""
        if not self.style.has_unicode:
            text = text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
        print(text, flush=True)

    def turn(self, kind: str, turn: Turn) -> None:
        """Print a turn's times, the model's and the tools', and how each of its calls was served."""
        head = f"  {kind:<12}{turn.answered_s - turn.started_s:.2f} + {turn.ended_s - turn.answered_s:.2f} s  "
        for call in turn.calls:
            self.draw(_cut(f"{head}{turn.served(call) or '':<5}{_spelled(call)}", self.style.width))
            head = " " * len(head)

    def run(self, kind: str, run: AgentRun) -> None:
        """Print how long a run took."""
        self.draw(f"  {kind:<12}{run.duration_s:.2f} s in all")


def terminal_style() -> Style:
    """What standard output can show: colour on a terminal unless NO_COLOR is set, ASCII by its encoding."""
    try:
        "".join(BLOCKS.values()).encode(sys.stdout.encoding or "ascii")
        has_unicode = True
    except UnicodeEncodeError:
        has_unicode = False
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = min(120, max(80, shutil.get_terminal_size((100, 24)).columns))
    return Style(width=width, has_colour=has_colour, has_unicode=has_unicode)


def _spelled(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(map(repr, arguments.values()))})"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
