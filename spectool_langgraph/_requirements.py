"""Imported first: says which extra is missing, before an import further down fails without a word about it."""

from __future__ import annotations

from importlib.util import find_spec

from spectool_core.errors import MissingExtraError

for module in ("langchain", "langgraph"):
    if find_spec(module) is None:
        raise MissingExtraError(module, "langgraph")
