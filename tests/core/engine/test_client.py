"""What the user is told of an engine that cannot help."""

from __future__ import annotations

import logging
import re

import pytest

from spectool_core.engine.client import EngineClient
from spectool_core.engine.endpoint import EngineEndpoint
from spectool_core.events import EngineUnavailable

REASONS = re.findall(r'"(\w+)"', (EngineUnavailable.__doc__ or "").replace("post_refused_", "post_refused_413"))


def client() -> EngineClient:
    return EngineClient(EngineEndpoint("http://engine/v1"), lambda event: None)


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_is_told_in_words(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spectool"):
        client().warn(reason)

    (record,) = caplog.records
    assert f" ({reason}). " in record.getMessage()
    assert len(record.getMessage()) > 120


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = client()
    with caplog.at_level(logging.WARNING, "spectool"):
        told.warn("unreachable")
        told.warn("plugin_absent")

    assert len(caplog.records) == 1


def test_all_reasons_are_known() -> None:
    assert len(REASONS) == 8
