import re

import pytest

from examples.demo.timeline import BLOCKS, Chart, Span, Style, timeline

STOCK = Chart(
    "stock",
    [
        Span("model", "1", 0.0, 1.0, "model"),
        Span("search", "", 1.0, 2.0, "tool"),
        Span("model", "2", 2.0, 3.0, "model"),
    ],
)
SPECULATIVE = Chart(
    "spec.",
    [
        Span("model", "1", 0.0, 1.0, "model"),
        Span("small", "1", 0.0, 0.2, "speculator"),
        Span("search", "join", 0.2, 1.2, "join"),
        Span("search", "", 0.2, 1.0, "wasted"),
        Span("model", "2", 1.2, 2.2, "model"),
    ],
)


def test_bars_begin_and_end_where_their_times_are():
    lines = timeline([STOCK, SPECULATIVE], Style(width=38, has_unicode=False)).splitlines()
    assert lines[:10] == [
        "stock  0 s       1         2         3",
        "model  1#########          2#########",
        "search           ----------",
        "",
        "spec.  0 s       1         2         3",
        "model  1#########  2#########",
        "small  1%",
        "search   xxxxxxxx",
        "         join~~~~~~",
        "",
    ]


def test_the_legend_names_what_occurs():
    legend = timeline([STOCK], Style(width=80, has_unicode=False)).splitlines()[-1]
    assert legend == "### main model   --- tool, after the model asked"


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("has_unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(width, has_unicode):
    for seconds in (0.001, 0.37, 1.0, 59.9, 4000.0):
        spans = [Span("a rather long lane", "1", 0.0, seconds, "model"), Span("b", "", seconds / 2, seconds, "hit")]
        text = timeline([Chart("t", [*spans, *SPECULATIVE.spans])], Style(width, has_unicode=has_unicode))
        assert max(map(len, text.splitlines())) <= width


def test_colour_adds_codes_and_changes_no_character():
    plain = timeline([STOCK, SPECULATIVE], Style(100))
    coloured = timeline([STOCK, SPECULATIVE], Style(100, has_colour=True))
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_ascii_is_ascii():
    assert timeline([STOCK, SPECULATIVE], Style(has_unicode=False)).isascii()


def test_every_kind_has_a_glyph_of_its_own():
    assert len(set(BLOCKS.values())) == len(BLOCKS)


def test_a_bar_too_short_for_its_label_goes_without():
    lines = timeline([Chart("t", [Span("a", "join", 0, 0.1, "join"), Span("a", "", 0, 10, "tool")])], Style(40))
    assert "join" not in lines.splitlines()[1]


def test_an_empty_chart_is_no_error():
    assert timeline([Chart("nothing", [])], Style(80)).startswith("nothing 0 s")
    assert timeline([], Style(80)) == ""
