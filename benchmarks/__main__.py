"""All benchmarks, one after the other: `python -m benchmarks`."""

from __future__ import annotations

from benchmarks import cpu, latency, micro

if __name__ == "__main__":
    # The one with options first: `--help` ends it before anything is measured.
    latency.main()
    cpu.main()
    micro.main()
