"""Where a model is served and with which credentials, as the openai SDK itself resolves them."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from spectool_core.errors import ConfigurationError

__all__ = ["Endpoint", "resolve_endpoint"]

_OPENAI_HOSTS = ("openai.com", "openai.azure.com", "cognitiveservices.azure.com")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One OpenAI-compatible chat-completions endpoint.

    Args:
        url: of the chat completions.
        headers: sent with each request, credentials among them.
        proxy: the HTTP proxy on the way, if any.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    proxy: str | None = field(repr=False)

    @property
    def is_openai(self) -> bool:
        """Whether OpenAI's own models are served, by OpenAI or Azure."""
        host = urlsplit(self.url).hostname or ""
        return any(host == known or host.endswith(f".{known}") for known in _OPENAI_HOSTS)


def resolve_endpoint(base_url: Any, api_key: Any, extra_headers: Mapping[str, str] | None) -> Endpoint:
    """Resolve what was given or, where None, the environment variables that the openai SDK reads.

    Raises:
        ConfigurationError: naming `api_key`, `base_url` or `extra_headers`; a key itself is never shown.
    """
    import openai

    if api_key is not None and not isinstance(api_key, str):
        raise ConfigurationError("api_key", type(api_key).__name__, "a string, or None for OPENAI_API_KEY")
    if base_url is not None and not isinstance(base_url, str):
        raise ConfigurationError("base_url", base_url, _ALLOWED_URL)
    # Small bodies are cheaper plain, and a compressed stream may arrive late.
    defaults = {"User-Agent": "spectool", "Accept-Encoding": "identity", **_checked_headers(extra_headers)}
    try:
        # Resolves and is thrown away: sending through the SDK costs three times the client CPU.
        with openai.OpenAI(api_key=api_key, base_url=base_url, default_headers=defaults) as sdk:
            given = {**sdk.auth_headers, **sdk.default_headers}
            resolved_url = str(sdk.base_url)
    except openai.OpenAIError:
        raise ConfigurationError("api_key", None, _ALLOWED_KEY) from None
    except Exception as exc:  # InvalidURL of whichever HTTP library this SDK brings
        raise ConfigurationError("base_url", base_url, _ALLOWED_URL) from exc
    headers = {name: value for name, value in given.items() if isinstance(value, str) and not _is_telemetry(name)}
    if "Authorization" not in headers:
        raise ConfigurationError("api_key", None, _ALLOWED_KEY)
    if not _can_be_sent(headers["Authorization"]):
        raise ConfigurationError("api_key", "(hidden)", _ALLOWED_VALUE)
    url_used = resolved_url if base_url is None else base_url
    url = _completions_url(url_used)
    if url is None:
        raise ConfigurationError("base_url", url_used, _ALLOWED_URL)
    return Endpoint(url, headers, _proxy(url))


_ALLOWED_KEY = "a string, or None where the environment has OPENAI_API_KEY"
_ALLOWED_URL = "an http:// or https:// URL such as http://localhost:8000/v1, or None for OPENAI_BASE_URL or OpenAI"
_ALLOWED_VALUE = "printable ASCII text, so no line end either"


def _is_telemetry(name: str) -> bool:
    return name.lower().startswith("x-stainless")


def _checked_headers(headers: Any) -> Mapping[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise ConfigurationError("extra_headers", type(headers).__name__, "None or a mapping of names to text")
    for name, value in headers.items():
        if not (isinstance(name, str) and isinstance(value, str) and _can_be_sent(name + value)):
            raise ConfigurationError("extra_headers", {name: "(hidden)"}, _ALLOWED_VALUE)
    return headers


def _can_be_sent(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _completions_url(base_url: str) -> str | None:
    try:
        parts = urlsplit(base_url)
        is_allowed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    if not is_allowed:
        return None
    if "@" in parts.netloc:
        raise ConfigurationError("base_url", "(hidden)", "a URL without user name and password; there is api_key")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/chat/completions"))


def _proxy(url: str) -> str | None:
    """The proxy that the environment prescribes, as for the SDK: what the main model can reach, the speculator can."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
