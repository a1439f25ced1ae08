"""How models write tool calls: one small class a format, which reads a turn as vLLM's parser of that format would."""

from __future__ import annotations

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.formats.format import ToolFormat
from spectool_core.vllm.formats.harmony import Harmony
from spectool_core.vllm.formats.hermes import Hermes
from spectool_core.vllm.formats.llama3_json import Llama3Json
from spectool_core.vllm.formats.mistral import Mistral
from spectool_core.vllm.formats.xlam import XLam

__all__ = ["FORMATS", "Harmony", "Hermes", "Llama3Json", "Mistral", "ToolFormat", "XLam", "tool_format"]

FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "qwen": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "xlam": XLam,
    "harmony": Harmony,
}


def tool_format(name: str) -> ToolFormat:
    """The format of this name.

    Raises:
        ConfigurationError: there is none; the message lists those that there are.
    """
    if name not in FORMATS:
        raise ConfigurationError("tool_format", name, ", ".join(FORMATS))
    return FORMATS[name]()
