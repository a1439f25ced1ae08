"""A scripted server in a process of its own, for benchmarks: its work then costs the measured process nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Self

from spectool_core.errors import ConfigurationError
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import Script
from spectool_core.testing.server import ModelServer
from spectool_core.testing.statistics import ModelStatistics, ServerStatistics

__all__ = ["ModelServerProcess", "serve_parent"]

# The parent's import path comes first, without which the child might not find this module or the parent's scripts.
_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from spectool_core.testing.process import serve_parent
serve_parent()
"""


class ModelServerProcess:
    """Serves scripted models like `ModelServer`, in a child process that ends with its context or its parent.

    Args:
        models: as for `ModelServer`. They are pickled: functions in them must be importable by name from a module
            other than the main one, and answers cannot hold latches.
        port: 0 takes a free one.
        start_timeout_s: bound on the child's start.

    Raises:
        ConfigurationError: the models cannot be pickled.
    """

    def __init__(
        self, models: Mapping[str, ScriptedModel | Script], *, port: int = 0, start_timeout_s: float = 30.0
    ) -> None:
        try:
            self._models = pickle.dumps({name: ScriptedModel.of(model) for name, model in models.items()})
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            allowed = f"models that can be pickled, so functions of a module and no latches ({error})"
            raise ConfigurationError("models", models, allowed) from error
        self.port = port
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """The URL for OpenAI clients, `/v1` included; its port is known once the server has started."""
        return f"http://127.0.0.1:{self.port}/v1"

    def statistics(self) -> ServerStatistics:
        """Fetch the counts so far from the child."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10.0)
        try:
            connection.request("GET", "/statistics")
            counts = json.load(connection.getresponse())
        finally:
            connection.close()
        models = {name: ModelStatistics(**of_model) for name, of_model in counts.pop("models").items()}
        return ServerStatistics(**counts, models=models)

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _CHILD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        try:
            self.port = self._started_port(self._process)
        except BaseException:
            self._stop(self._process)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._stop(self._process)

    def _started_port(self, process: subprocess.Popen[bytes]) -> int:
        too_late = threading.Timer(self._start_timeout_s, process.kill)
        too_late.start()
        try:
            line = self._handshake(_pipe(process.stdin), _pipe(process.stdout))
        finally:
            too_late.cancel()
            too_late.join()
        if not line:
            raise RuntimeError("the model server's process ended before it was ready; its standard error says why")
        return int(line)

    def _handshake(self, to_child: IO[bytes], from_child: IO[bytes]) -> bytes:
        try:
            to_child.write(pickle.dumps(sys.path) + pickle.dumps(self.port) + self._models)
            to_child.flush()
        except BrokenPipeError:
            return b""
        return from_child.readline()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        # The child ends with its standard input, so that it also ends when this process dies.
        with contextlib.suppress(BrokenPipeError):
            _pipe(process.stdin).close()
        try:
            process.wait(self._start_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _pipe(process.stdout).close()


def serve_parent() -> None:
    """Be the child: read port and models from standard input, write the port to standard output, end with the input."""
    # An interrupt from the keyboard reaches the whole process group; the parent then stops this child in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Both come from the parent process through its own pipe.
    port = pickle.load(sys.stdin.buffer)  # noqa: S301
    models = pickle.load(sys.stdin.buffer)  # noqa: S301
    with ModelServer(models, port=port) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the child process was started without pipes")
    return pipe
