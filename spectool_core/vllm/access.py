"""Who may use the plugin's routes: vLLM checks API keys under /v1, /v2, /inference and /cohere only."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from spectool_core.vllm.wire import WireError

__all__ = ["ApiKeys"]


class ApiKeys:
    """The server's API keys, compared in constant time (as vllm/entrypoints/serve/middleware/authenticate.py does).

    Args:
        keys: empty ones do not count; where there are none, everybody may.
    """

    def __init__(self, keys: Iterable[str | None]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def check(self, authorization: str | None) -> None:
        """Check the header `Authorization: Bearer <key>`.

        Raises:
            WireError: 401.
        """
        if not self._digests:
            return
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.encode(errors="surrogatepass")).digest()
        is_known = False
        for known in self._digests:
            is_known |= secrets.compare_digest(digest, known)
        if scheme.lower() != "bearer" or not is_known:
            raise WireError(401, "Authorization: no valid API key; expected 'Bearer <key>'", "invalid_api_key")
