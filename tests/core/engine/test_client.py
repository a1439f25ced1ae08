"""What the user is told of an engine that cannot help."""

from __future__ import annotations

import logging
from typing import get_args

import pytest

from spectool_core.engine.client import EngineClient
from spectool_core.engine.endpoint import EngineEndpoint
from spectool_core.events import UnavailableReason


def client() -> EngineClient:
    return EngineClient(EngineEndpoint("http://engine/v1"), lambda event: None)


@pytest.mark.parametrize("reason", get_args(UnavailableReason))
def test_each_reason_is_told_in_words(reason: UnavailableReason, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spectool"):
        client().warn(reason)

    (record,) = caplog.records
    assert f" ({reason}). " in record.getMessage()
    assert len(record.getMessage()) > 120


def test_the_status_of_a_refused_post_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spectool"):
        client().warn("post_refused", 413)

    assert " (post_refused: 413). " in caplog.records[0].getMessage()


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = client()
    with caplog.at_level(logging.WARNING, "spectool"):
        told.warn("unreachable")
        told.warn("plugin_absent")

    assert len(caplog.records) == 1
