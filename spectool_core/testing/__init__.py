"""Test doubles for programs that use spectool: scripted models over HTTP or in process, fake tools, a virtual clock."""

from spectool_core.testing.behaviour import EngineBehaviour
from spectool_core.testing.clock import run_virtual, sleep_until, virtual_event_loop
from spectool_core.testing.engine import EngineServer, FakeEngineStatistics
from spectool_core.testing.faults import DroppedConnection, EmptyChoices, Fault, Hang, HttpError, TruncatedAnswer
from spectool_core.testing.inprocess import ModelPlayback, ScriptedFaultError, ScriptedSpeculator
from spectool_core.testing.latch import Latch, LatchStatistics
from spectool_core.testing.leaks import LeakCheck, LeakError
from spectool_core.testing.models import Quirks, ScriptedModel, wrong_arguments
from spectool_core.testing.process import ModelServerProcess
from spectool_core.testing.script import Answer, ChatRequest, Flaky, Script, ScriptedCall, ScriptEndedError
from spectool_core.testing.server import ModelServer
from spectool_core.testing.statistics import ModelStatistics, ServerStatistics
from spectool_core.testing.tools import FakeTool, FakeToolStatistics

__all__ = [
    "Answer",
    "ChatRequest",
    "DroppedConnection",
    "EmptyChoices",
    "EngineBehaviour",
    "EngineServer",
    "FakeEngineStatistics",
    "FakeTool",
    "FakeToolStatistics",
    "Fault",
    "Flaky",
    "Hang",
    "HttpError",
    "Latch",
    "LatchStatistics",
    "LeakCheck",
    "LeakError",
    "ModelPlayback",
    "ModelServer",
    "ModelServerProcess",
    "ModelStatistics",
    "Quirks",
    "Script",
    "ScriptEndedError",
    "ScriptedCall",
    "ScriptedFaultError",
    "ScriptedModel",
    "ScriptedSpeculator",
    "ServerStatistics",
    "TruncatedAnswer",
    "run_virtual",
    "sleep_until",
    "virtual_event_loop",
    "wrong_arguments",
]
