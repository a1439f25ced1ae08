"""Where an engine is served: which requests are its chat completions, and where tool outputs are posted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from spectool_core.vllm.wire import ID_PREFIX, OUTPUTS_PATH

__all__ = ["Address", "EngineEndpoint"]

_CHAT_PATH = "/chat/completions"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the outputs for one response are posted, and with which headers."""

    url: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine with the plugin.

    Args:
        url: as given to OpenAI clients, `/v1` included.
        api_key: for what is posted; None takes the credentials of the chat request.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)

    def serves(self, url: Any) -> bool:
        """Whether a request to `url` is one for this engine's chat completions."""
        ours, asked = urlsplit(self.url.rstrip("/") + _CHAT_PATH), urlsplit(str(url))
        return (ours.scheme, ours.hostname, ours.port or _PORTS.get(ours.scheme), ours.path) == (
            asked.scheme,
            asked.hostname,
            asked.port or _PORTS.get(asked.scheme),
            asked.path,
        )

    @staticmethod
    def is_chat(url: Any) -> bool:
        """Whether a request to `url` is one for anyone's chat completions."""
        return urlsplit(str(url)).path.endswith(_CHAT_PATH)

    def address(self, request_id: str, secret_header: tuple[str, str], authorization: str | None) -> Address:
        """Where to post for the response to the request with this id; `authorization` is that request's."""
        root = self.url.rstrip("/").removesuffix("/v1")
        if self.api_key is not None:
            authorization = f"Bearer {self.api_key}"
        credentials = () if authorization is None else (("Authorization", authorization),)
        return Address(f"{root}{OUTPUTS_PATH}{ID_PREFIX}{request_id}", (secret_header, *credentials))
