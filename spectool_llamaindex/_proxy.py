"""The base of transparent proxies; wrapt's own is generic from version 2 on only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wrapt

__all__ = ["Proxy"]

if TYPE_CHECKING:
    Proxy = wrapt.ObjectProxy[Any]
else:
    Proxy = wrapt.ObjectProxy
