from __future__ import annotations

import pytest

from spectool_core.engine.endpoint import EngineEndpoint

SECRET = ("X-Spectool-Secret", "s")


@pytest.mark.parametrize("url", ["http://host:8000/v1", "http://host:8000/v1/"])
def test_the_chat_completions_of_the_engine_and_of_others(url: str) -> None:
    endpoint = EngineEndpoint(url)
    assert endpoint.serves("http://host:8000/v1/chat/completions")
    assert endpoint.serves("http://HOST:8000/v1/chat/completions?api-version=1")
    others = ["http://host:8001/v1/chat/completions", "https://host:8000/v1/chat/completions", "http://host:8000/v1/x"]
    assert not any(map(endpoint.serves, others))
    assert [endpoint.is_chat(other) for other in others] == [True, True, False]


def test_default_ports_may_be_spelled_out() -> None:
    assert EngineEndpoint("https://host/v1").serves("https://host:443/v1/chat/completions")
    assert EngineEndpoint("http://host:80/v1").serves("http://host/v1/chat/completions")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000/v1", "http://host:8000/cache-tool-output/chatcmpl-id"),
        ("http://host/proxy/v1/", "http://host/proxy/cache-tool-output/chatcmpl-id"),
        ("http://host", "http://host/cache-tool-output/chatcmpl-id"),
    ],
)
def test_outputs_are_posted_beside_v1(url: str, expected: str) -> None:
    assert EngineEndpoint(url).address("id", SECRET, None).url == expected


def test_the_key_is_the_models_unless_one_is_given() -> None:
    given, own = EngineEndpoint("http://host/v1", "key"), EngineEndpoint("http://host/v1")
    assert given.address("id", SECRET, "Bearer m").headers == (SECRET, ("Authorization", "Bearer key"))
    assert own.address("id", SECRET, "Bearer m").headers == (SECRET, ("Authorization", "Bearer m"))
    assert own.address("id", SECRET, None).headers == (SECRET,)
    shown = repr(given) + repr(given.address("id", SECRET, None))
    assert "key" not in shown
    assert "'s'" not in shown
