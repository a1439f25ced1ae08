from __future__ import annotations

from typing import Any

import pytest

from spectool_core import ConfigurationError
from spectool_core.errors import MissingExtraError
from spectool_core.vllm import serve
from spectool_core.vllm.formats import FORMATS
from spectool_core.vllm.serve import server_command, server_environment
from spectool_core.vllm.settings import EngineSettings


def test_settings_come_out_of_the_additional_config() -> None:
    assert EngineSettings.of({}) == EngineSettings.of(None) == EngineSettings()
    assert EngineSettings.of({"spectool": {"level": "o2+o3", "hold_s": 3}, "other": 1}).hold_s == 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"level": "o4"}, "level='o4' is not allowed; allowed: 'sessions', 'o3' or 'o2\\+o3'"),
        ({"hold": 1}, "hold=1 is not allowed; allowed: one of the settings level, tool_format"),
        ({"max_parked": 0}, "max_parked=0 is not allowed"),
        ([], "spectool=\\[\\] is not allowed; allowed: an object of settings"),
    ],
)
def test_wrong_settings_are_named(part: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineSettings.of({"spectool": part})


@pytest.mark.parametrize(
    ("level", "held", "absent"),
    [
        ("sessions", [], ["--scheduler-cls", "--speculative-config"]),
        ("o3", ["--scheduler-cls"], ["--speculative-config", "--no-async-scheduling"]),
        ("o2+o3", ["--scheduler-cls", "--speculative-config", "--no-async-scheduling"], []),
    ],
)
def test_flags_of_each_level(level: Any, held: list[str], absent: list[str]) -> None:
    command = server_command("model", ["--port", "1"], EngineSettings(level=level), on_cpu=False)
    assert all(flag in command for flag in held)
    assert not any(flag in command for flag in [*absent, "--enforce-eager"])
    assert command[-2:] == ["--port", "1"], "the user's own come last, and win"


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_by_vllms_own_parser_of_it(name: str) -> None:
    command = server_command("model", [], EngineSettings(tool_format=name), on_cpu=False)
    parser = {"qwen": "hermes", "harmony": "openai"}.get(name, name)
    assert command[command.index("--tool-call-parser") + 1] == parser


def test_flags_of_a_format_and_of_a_cpu() -> None:
    command = server_command("model", [], EngineSettings(tool_format="qwen"), on_cpu=True)
    assert "--enforce-eager" in command
    with pytest.raises(ConfigurationError, match="tool_format='smoke' is not allowed; allowed: hermes, qwen"):
        server_command("model", [], EngineSettings(tool_format="smoke"), on_cpu=True)


@pytest.mark.parametrize(
    "flags", [["--api-server-count", "2"], ["--data-parallel-size=4"], ["-dp", "2"], ["-asc="], ["-dp"]]
)
def test_several_engines_or_servers_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="allowed: 1 in engine mode"):
        server_command("model", flags, EngineSettings(), on_cpu=False)
    server_command("model", [flags[0].split("=")[0], "1"], EngineSettings(), on_cpu=False)


def test_the_environment_allows_the_plugin_and_keeps_what_was_set() -> None:
    assert server_environment({"VLLM_PLUGINS": "mine"}, on_cpu=False) == {"VLLM_PLUGINS": "mine,spectool"}
    on_cpu = server_environment({"OMP_NUM_THREADS": "7"}, on_cpu=True)
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["VLLM_CPU_OMP_THREADS_BIND"]) == ("7", "nobind")


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise serve.PackageNotFoundError(name)

    monkeypatch.setattr(serve, "distribution", absent)
    with pytest.raises(
        MissingExtraError, match="vllm is not installed; install it with: pip install 'spectool\\[vllm\\]'"
    ):
        serve.installed_vllm()
