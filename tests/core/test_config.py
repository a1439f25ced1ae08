from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from spectool_core.config import SpeculationConfig, validated_config
from spectool_core.errors import ConfigurationError, SpectoolError

COUNTS = ["max_runs_per_turn", "max_runs_per_tool", "max_concurrency", "max_concurrency_per_tool", "max_results"]


def test_the_defaults_are_valid() -> None:
    assert validated_config() == SpeculationConfig()


@pytest.mark.parametrize("mode", ["client", "shadow", "off"])
def test_every_mode_is_accepted(mode: str) -> None:
    assert validated_config(mode=mode).mode == mode


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in COUNTS for value in (0, -1, True, 1.5, 2.0, "3", None, math.nan)),
        *(("max_runs", value) for value in (-1, True, 1.5, "3")),
        *(("ttl_s", value) for value in (0, -1.0, math.nan, math.inf, True, "60", None)),
        *(("timeout_s", value) for value in (0, -0.5, math.nan, math.inf, True, "60")),
        *(("mode", value) for value in ("on", "CLIENT", "", None, 1)),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validated_config(**{field: value})
    error = caught.value
    assert error.field == field
    assert error.value is value
    assert error.allowed
    assert str(error) == f"{field}={value!r} is not allowed; allowed: {error.allowed}"
    assert isinstance(error, SpectoolError)
    assert isinstance(error, ValueError)


def test_what_is_allowed_is_said_in_words() -> None:
    with pytest.raises(ConfigurationError, match="'client', 'shadow' or 'off'"):
        validated_config(mode="on")
    with pytest.raises(ConfigurationError, match="greater than or equal to 1"):
        validated_config(max_results=0)
    with pytest.raises(ConfigurationError, match="greater than 0"):
        validated_config(ttl_s=0)


def test_an_unknown_setting_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigurationError, match="max_runs_per_turn") as caught:
        validated_config(max_run=3)
    assert caught.value.field == "max_run"
    assert caught.value.value == 3


def test_none_and_zero_runs_and_whole_seconds_are_allowed() -> None:
    config = validated_config(max_runs=0, timeout_s=None, ttl_s=5)
    assert (config.max_runs, config.timeout_s, config.ttl_s) == (0, None, 5.0)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        validated_config().max_runs = 1  # type: ignore[misc]


ENGINE = {"engine": "vllm", "engine_url": "http://localhost:8000/v1"}


def test_an_engine_has_a_url_and_may_have_a_key() -> None:
    config = validated_config(**ENGINE, engine_api_key="secret")
    assert (config.engine, config.engine_url) == ("vllm", "http://localhost:8000/v1")
    assert config.engine_api_key is not None
    assert config.engine_api_key.get_secret_value() == "secret"
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("engine", {**ENGINE, "engine": "sglang"}),
        ("engine_url", {"engine": "vllm"}),
        ("engine_url", {"engine_url": "http://localhost:8000/v1"}),
        *(
            ("engine_url", {**ENGINE, "engine_url": url})
            for url in ("localhost:8000", "http://localhost:8000", "ftp://x/v1", "http://", "", 7)
        ),
        ("engine_api_key", {"engine_api_key": "secret"}),
        ("engine_api_key", {**ENGINE, "engine_api_key": ""}),
        ("engine_api_key", {**ENGINE, "engine_api_key": 7}),
    ],
)
def test_an_engine_that_is_half_named_is_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validated_config(**settings)
    assert caught.value.field == field
    assert caught.value.allowed
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://user:hunter2@host/v1", "http://hunter2@host/v1", "ftp://a:hunter2@b@host/v1"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="engine_url=") as caught:
        validated_config(engine="vllm", engine_url=url)
    assert "host/v1" in str(caught.value)
    assert "hunter2" not in str(caught.value)
