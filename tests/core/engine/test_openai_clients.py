"""Whose requests come by, and that nothing goes wrong with the others."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from spectool_core.engine import follow
from spectool_core.engine.transport import EngineTransport


@pytest.fixture
def http_client() -> Iterator[httpx.Client]:
    with httpx.Client(proxy="http://127.0.0.1:9") as made:
        yield made


@pytest.mark.parametrize("given", [None, object(), httpx.URL("http://x")])
def test_what_is_no_client_of_the_openai_package_is_not_followed(given: Any) -> None:
    assert follow(given) is False


@pytest.mark.parametrize("missing", ["_mounts", "_transport"])
def test_a_client_whose_transport_cannot_be_reached_is_not_followed(http_client: httpx.Client, missing: str) -> None:
    client = openai.OpenAI(api_key="key", http_client=http_client)
    there = http_client.__dict__.pop(missing)
    assert follow(client) is False
    http_client.__dict__[missing] = there


def test_a_client_that_holds_its_http_client_elsewhere_is_not_followed(http_client: httpx.Client) -> None:
    client = openai.OpenAI(api_key="key", http_client=http_client)
    del client._client
    assert follow(client) is False


def test_each_transport_is_followed_once(http_client: httpx.Client) -> None:
    inner, mounted = http_client._transport, list(http_client._mounts.values())
    for client in [openai.OpenAI(api_key="key", http_client=http_client) for _ in range(2)]:
        assert follow(client)
        assert follow(client)
    ours = [http_client._transport, *http_client._mounts.values()]
    assert all(isinstance(transport, EngineTransport) for transport in ours)
    assert [transport._inner for transport in ours] == [inner, *mounted]  # type: ignore[attr-defined]


def test_all_but_requests_is_the_inner_transports() -> None:
    http_client = httpx.Client()
    inner: Any = http_client._transport
    follow(openai.OpenAI(api_key="key", http_client=http_client))
    ours: Any = http_client._transport
    assert ours._pool is inner._pool
    assert copy.copy(ours)._pool is inner._pool
    with pytest.raises(AttributeError):
        _ = ours.no_such_thing


def test_without_the_openai_package_nothing_is_followed() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from spectool_core.engine import follow\n"
        "assert follow(object()) is False\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
