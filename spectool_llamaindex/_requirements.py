"""Imported first: says which extra is missing, before an import further down fails without a word about it."""

from __future__ import annotations

from importlib import import_module

from spectool_core.errors import MissingExtraError

for module in ("llama_index.core", "workflows", "llama_index_instrumentation", "wrapt"):
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(module, "llamaindex") from error
