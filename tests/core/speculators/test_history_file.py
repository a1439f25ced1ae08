from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spectool_core import HistorySpeculator
from spectool_core.calls import Prompt
from spectool_core.errors import ConfigurationError
from tests.core.speculators.test_history import TOOLS, asked, asks, returns, user

CONVERSATIONS = [
    [user(f"Hello, {n}: AB{n}9"), asks("get_order", id=f"AB{n}9", scope="all"), returns({"items": [n, n + 1]})]
    for n in range(8)
]
PROMPT = [user("Hello, you: XY99")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    speculator = HistorySpeculator(path=tmp_path / "history.jsonl")
    for conversation in CONVERSATIONS:
        speculator.learn(conversation)
        speculator.learn(conversation, tenant="acme")
    speculator.save()
    return tmp_path / "history.jsonl"


async def test_what_was_saved_is_known_again(path: Path) -> None:
    before = HistorySpeculator(path=str(path))
    predictions = await asked(before, PROMPT)
    assert predictions[0].arguments == {"id": "XY99", "scope": "all"}
    before.forget()
    for conversation in CONVERSATIONS:
        before.learn(conversation)
    again = await asked(before, PROMPT)
    assert [(each.name, each.arguments, each.probability) for each in predictions] == [
        (each.name, each.arguments, pytest.approx(each.probability)) for each in again
    ]


async def test_tenants_stay_apart(path: Path) -> None:
    speculator = HistorySpeculator(path=path, tenant=lambda prompt: prompt.native)
    assert speculator.statistics().num_tenants == 2
    for tenant, knows in (("acme", True), ("other", False)):
        prompt = Prompt(PROMPT, native=tenant)
        assert bool([guess async for guess in speculator.predict(prompt, TOOLS)]) is knows


def test_saving_what_was_loaded_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    HistorySpeculator(path=path).save()
    assert path.read_bytes() == before


def test_no_file_is_an_empty_beginning(tmp_path: Path) -> None:
    speculator = HistorySpeculator(path=tmp_path / "none.jsonl")
    assert speculator.statistics().num_templates == 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_loaded_that_was_not_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert HistorySpeculator().statistics().num_templates == 0
    with pytest.raises(ConfigurationError, match="path"):
        HistorySpeculator().save()


def test_it_holds_no_value_of_a_single_conversation(tmp_path: Path) -> None:
    speculator = HistorySpeculator(path=tmp_path / "history.jsonl")
    for n in range(8):
        messages = [user(f"My name is Mia, secret{n}42"), asks("find_user", id=f"secret{n}42", note=f"note {n}")]
        speculator.learn([*messages, returns({"private": f"secret{n}42"}), asks("get_order", id=f"secret{n}42")])
    speculator.save()
    text = (tmp_path / "history.jsonl").read_text()
    assert "secret" not in text
    assert "note " not in text
    assert "Mia" not in text
    assert '"private"' in text


def test_only_the_owner_may_read_it(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def test_the_old_file_stays_if_saving_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    speculator = HistorySpeculator(path=path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        speculator.save()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


HEADER = '{"format":"spectool history","version":1}\n'
TENANT = json.dumps({"tenant": "", "calibration": [[0.0, 0.0]] * 20}) + "\n"
TEMPLATE: dict[str, Any] = {
    "tenant": "",
    "tool": "search",
    "sources": [{"pool": ["text", "user", "a9"], "pick": 0, "fields": [["id", ""]]}],
    "constants": [["scope", '"all"']],
    "fits": [[[False, True], 1.0, 2.0]],
    "follows": [],
}


def line(**changes: Any) -> str:
    return json.dumps({**TEMPLATE, **changes}) + "\n"


def test_the_format_is_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text(HEADER + TENANT + line())
    assert HistorySpeculator(path=tmp_path / "history.jsonl").statistics().num_templates == 1


@pytest.mark.parametrize(
    ("content", "number", "reason"),
    [
        ("", 1, "header"),
        ("{}\n", 1, "header"),
        ("\x00\x80pickle", 1, "header"),
        ('{"spectool_trace":1}\n', 1, "header"),
        ('{"format":"spectool history","version":2}\n', 1, "this file is of version 2"),
        (HEADER + "not JSON\n", 2, "a line that"),
        (HEADER + TENANT + "[]\n", 3, "a line that"),
        (HEADER + TENANT + line()[:-9], 3, "a line that"),
        (HEADER + line(), 2, "a line that"),
        (HEADER + TENANT + line(extra=1), 3, "a line that"),
        (HEADER + TENANT + line(tool=5), 3, "a line that"),
        (HEADER + TENANT + line(constants=[["scope", "all"]]), 3, "a line that"),
        (HEADER + TENANT + line(fits=[[[False], -1.0, 2.0]]), 3, "a line that"),
        (HEADER + TENANT + line(sources=[{"pool": ["exec", "a", "b"], "pick": 0, "fields": []}]), 3, "a line that"),
        (HEADER + TENANT + "[" * 100_000 + "\n", 3, "a line that"),
        (HEADER + '{"tenant":"","calibration":[[0.0,0.0]]}\n', 2, "a line that"),
    ],
)
def test_a_file_that_is_not_ours_or_corrupt_is_named_with_the_line(
    tmp_path: Path, content: str, number: int, reason: str
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError) as raised:
        HistorySpeculator(path=path)
    assert f"{path}, line {number}" in str(raised.value)
    assert reason in str(raised.value)
