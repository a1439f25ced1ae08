"""All benchmarks, one after the other: `python -m benchmarks`."""

from __future__ import annotations

from benchmarks import cpu, latency, micro

if __name__ == "__main__":
    micro.main()
    cpu.main()
    latency.main()
