"""Which clients are adopted, and that nothing goes wrong with the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from spectool_core.engine import EngineClient, EngineEndpoint


@pytest.fixture
def engine() -> EngineClient:
    return EngineClient(EngineEndpoint("http://127.0.0.1:9/v1"), lambda event: None)


@pytest.fixture
def http_client() -> Iterator[httpx.Client]:
    with httpx.Client() as made:
        yield made


@pytest.mark.parametrize("given", [None, object(), httpx.URL("http://x")])
def test_what_is_no_client_of_the_openai_package_is_not_adopted(engine: EngineClient, given: Any) -> None:
    assert engine.adopt(given) is None


def test_a_client_whose_transport_cannot_be_reached_is_not_adopted(
    engine: EngineClient, http_client: httpx.Client
) -> None:
    client = openai.OpenAI(api_key="key", http_client=http_client)
    mounts = http_client.__dict__.pop("_mounts")
    assert engine.adopt(client) is None
    http_client.__dict__["_mounts"] = mounts


def test_a_client_that_holds_its_http_client_elsewhere_is_not_adopted(
    engine: EngineClient, http_client: httpx.Client
) -> None:
    client = openai.OpenAI(api_key="key", http_client=http_client)
    del client._client
    assert engine.adopt(client) is None


def test_a_client_that_cannot_be_copied_is_not_adopted(engine: EngineClient, http_client: httpx.Client) -> None:
    class Own(openai.OpenAI):
        def __init__(self, token: str, **options: Any) -> None:
            super().__init__(api_key=token, **options)

    client = Own("key", http_client=http_client)
    with pytest.raises(TypeError):
        client.with_options(timeout=1.0)
    assert engine.adopt(client) is None


def test_without_the_openai_package_nothing_is_adopted() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from spectool_core.engine import EngineClient, EngineEndpoint\n"
        "assert EngineClient(EngineEndpoint('http://x/v1'), print).adopt(object()) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
