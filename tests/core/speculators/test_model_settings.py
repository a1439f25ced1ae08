"""What a model speculator is made from: settings, credentials and addresses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from spectool_core.errors import ConfigurationError
from spectool_core.speculators import ModelSpeculator, Speculator
from spectool_core.speculators._endpoint import resolve_endpoint
from spectool_core.speculators.model import speculator_from_string

VARIABLES = ["API_KEY", "ADMIN_KEY", "BASE_URL", "ORG_ID", "PROJECT_ID", "CUSTOM_HEADERS"]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(f"OPENAI_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", " "),
        ("model", None),
        ("num_samples", 0),
        ("num_samples", True),
        ("num_samples", 1.5),
        ("streaming", "yes"),
        ("streaming", 1),
        ("streaming", None),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", float("inf")),
        ("timeout_s", None),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("name", ""),
        ("base_url", ""),
        ("base_url", "localhost:8000/v1"),
        ("base_url", "ftp://localhost/v1"),
        ("base_url", "http://"),
        ("base_url", "http://["),
        ("base_url", "http://localhost:port/v1"),
        ("base_url", 8000),
        ("extra_body", ["n"]),
        ("extra_body", {"x": object()}),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    settings = {"model": "m", "api_key": "k", field: value}
    with pytest.raises(ConfigurationError) as error:
        ModelSpeculator(**settings)
    assert error.value.field == field
    assert error.value.value == value
    assert error.value.allowed


@pytest.mark.parametrize("field", ["n", "stream", "messages", "tools", "model"])
def test_extra_fields_cannot_take_over_the_request(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"extra_body=.*{field}"):
        ModelSpeculator("m", api_key="k", extra_body={field: 1})


@pytest.mark.parametrize("headers", [["X-Team"], {"X-Team": 1}, {"X-Team": "secret\n"}, {"X-\r\nTeam": "secret"}])
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(headers: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        ModelSpeculator("m", api_key="k", extra_headers=headers)
    assert error.value.field == "extra_headers"
    assert "secret" not in str(error.value)


def test_without_credentials_it_cannot_be_made() -> None:
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY") as error:
        ModelSpeculator("m")
    assert error.value.field == "api_key"


def test_an_admin_key_is_no_credential_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "k")
    with pytest.raises(ConfigurationError) as error:
        ModelSpeculator("m")
    assert error.value.field == "api_key"


@pytest.mark.parametrize("key", ["", 5, "line\nend", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        ModelSpeculator("m", api_key=key)
    assert error.value.field == "api_key"
    assert not key or str(key) not in str(error.value)


def test_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://environment/v1")
    endpoint = resolve_endpoint("http://argument/v1/", "of the argument", None)
    assert endpoint.url == "http://argument/v1/chat/completions"
    assert endpoint.headers["Authorization"] == "Bearer of the argument"


def test_the_environment_is_read_as_the_sdk_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://environment/v1")
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: a")
    endpoint = resolve_endpoint(None, None, {"X-Team": "blue"})
    assert endpoint.url == "http://environment/v1/chat/completions"
    assert endpoint.headers == {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Authorization": "Bearer k",
        "Content-Type": "application/json",
        "OpenAI-Organization": "org",
        "OpenAI-Project": "project",
        "User-Agent": "spectool",
        "X-Gateway": "a",
        "X-Team": "blue",
    }


def test_a_bad_address_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "nowhere")
    with pytest.raises(ConfigurationError, match="base_url='nowhere"):
        ModelSpeculator("m", api_key="k")


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError) as error:
        ModelSpeculator("m", api_key="k", base_url="http://user:pass-word@localhost/v1")
    assert error.value.field == "base_url"
    assert "pass-word" not in str(error.value)


def test_the_query_of_the_address_is_kept() -> None:
    endpoint = resolve_endpoint("https://host/v1?api-version=1", "k", None)
    assert endpoint.url == "https://host/v1/chat/completions?api-version=1"


def test_the_proxy_of_the_environment_is_used_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert resolve_endpoint("https://api.example/v1", "k", None).proxy == "http://proxy:3128"
    assert resolve_endpoint("https://localhost:8000/v1", "k", None).proxy is None
    assert resolve_endpoint("http://api.example/v1", "k", None).proxy is None


@pytest.mark.parametrize(
    ("base_url", "field"),
    [
        (None, "max_completion_tokens"),
        ("https://eu.api.openai.com/v1", "max_completion_tokens"),
        ("https://me.openai.azure.com/openai/v1", "max_completion_tokens"),
        ("http://localhost:8000/v1", "max_tokens"),
        ("https://notopenai.com/v1", "max_tokens"),
    ],
)
def test_the_bound_on_tokens_is_named_as_the_endpoint_knows_it(base_url: str | None, field: str) -> None:
    speculator = ModelSpeculator("m", api_key="k", base_url=base_url, max_tokens=9)
    assert speculator._settings == {"model": "m", field: 9}


def test_it_is_a_speculator_with_a_name() -> None:
    assert isinstance(ModelSpeculator("m", api_key="k"), Speculator)
    assert ModelSpeculator("m", api_key="k").name == "m"
    assert ModelSpeculator("m", api_key="k", name="small").name == "small"


def test_its_repr_shows_no_key() -> None:
    speculator = ModelSpeculator("m", api_key="secret-key", base_url="http://localhost/v1", num_samples=3)
    assert repr(speculator) == "ModelSpeculator('m', url='http://localhost/v1/chat/completions', num_samples=3)"
    assert "secret-key" not in repr(vars(speculator))


def test_the_short_form_names_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert speculator_from_string("openai:gpt-5-nano").model == "gpt-5-nano"
    assert speculator_from_string("openai:ft:gpt-5-nano:me::1").model == "ft:gpt-5-nano:me::1"


@pytest.mark.parametrize("text", ["", "gpt-5-nano", "openai:", "openai: ", "openai", "OpenAI:m", "anthropic:m"])
def test_another_short_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="openai:MODEL") as error:
        speculator_from_string(text)
    assert (error.value.field, error.value.value) == ("speculators", text)


def test_importing_the_core_imports_no_client() -> None:
    code = "import sys, json, spectool_core.speculators; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"openai", "aiohttp", "httpx", "httpx2", "yarl"} & set(modules)
