"""What the parts cost: the canonical key, and those of a framework's adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.frameworks import add_options, load
from benchmarks.timing import microseconds
from spectool_core.canonical import canonicalize

__all__ = ["main"]

TEN_ARGUMENTS = {
    "query": "opening hours of the upper station",
    "limit": 10,
    "offset": 0,
    "threshold": 0.75,
    "exact": False,
    "language": "en",
    "fields": ["title", "body", "date"],
    "filter": {"year": 2031, "kind": "notice"},
    "sort": "date",
    "page_token": None,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    given, _ = parser.parse_known_args(arguments)
    key = ("canonical key of ten arguments", microseconds(lambda: canonicalize(TEN_ARGUMENTS), 20_000))
    for part, cost_us in (key, *load(given.framework).parts()):
        print(f"{part:50s} {cost_us:8.2f} us", flush=True)


if __name__ == "__main__":
    main()
