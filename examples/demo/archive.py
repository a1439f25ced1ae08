"""The papers of an invented mountain railway: indexed, searched and read. Real work, no network, no models."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCUMENTS", "Archive", "ArchiveError", "Line", "Passage"]

DOCUMENTS = Path(__file__).parent / "documents"


class ArchiveError(Exception):
    """A request that the archive refuses; the message is for whoever asked, be it a model."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A section that the full-text search found, and the words around the match."""

    path: str
    heading: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a regular expression matched; lines count from 1."""

    path: str
    number: int
    text: str


class Archive:
    """A folder of Markdown documents, a full-text index of them in memory, and a book of notes.

    Args:
        root: the folder; nothing outside it can be read.
    """

    def __init__(self, root: Path = DOCUMENTS) -> None:
        self._root = root.resolve()
        self.paths: Sequence[str] = sorted(
            path.relative_to(self._root).as_posix() for path in self._root.rglob("*.md") if path.is_file()
        )
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE sections USING fts5(path, heading, body, tokenize = 'porter')")
        self._database.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, title TEXT NOT NULL, text TEXT NOT NULL)")
        rows = [(path, *section) for path in self.paths for section in _sections(self.read(path))]
        self._database.executemany("INSERT INTO sections VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        """Forget the index and the notes."""
        self._database.close()

    def read(self, path: str) -> str:
        """Give a document's text. Raises ArchiveError for anything that is not a document of this archive."""
        target = (self._root / path).resolve()
        if not target.is_relative_to(self._root):
            raise ArchiveError(f"{path!r} is outside the archive")
        if target.suffix != ".md" or not target.is_file():
            raise ArchiveError(f"no document {path!r}; there are: {', '.join(self.paths)}")
        return target.read_text(encoding="utf-8")

    def search(self, query: str, limit: int) -> list[Passage]:
        """Give the sections that best match any word of `query`, best first."""
        words = re.findall(r"\w+", query)
        if not words:
            raise ArchiveError("the query holds no word")
        rows = self._database.execute(
            "SELECT path, heading, snippet(sections, 2, '', '', ' ... ', 24) FROM sections WHERE sections MATCH ? "
            "ORDER BY bm25(sections, 1.0, 4.0, 1.0), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), limit),
        )
        return [Passage(path, heading, " ".join(excerpt.split())) for path, heading, excerpt in rows]

    def grep(self, pattern: str, under: str = "") -> list[Line]:
        """Give the lines that match `pattern` in the documents whose path begins with `under`, in order."""
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ArchiveError(f"{pattern!r} is not a regular expression: {error}") from error
        return [
            Line(path, number, text)
            for path in self.paths
            if path.startswith(under)
            for number, text in enumerate(self.read(path).splitlines(), 1)
            if expression.search(text)
        ]

    def save_note(self, title: str, text: str) -> int:
        """Write a note and give its number."""
        with self._database:
            number = self._database.execute("INSERT INTO notes (title, text) VALUES (?, ?)", (title, text)).lastrowid
        if number is None:
            raise ArchiveError("the note was not written")
        return number

    def notes(self) -> list[tuple[str, str]]:
        """Give title and text of every note, oldest first."""
        return self._database.execute("SELECT title, text FROM notes ORDER BY id").fetchall()


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Split a document at its headings; a section's heading names the document too."""
    title = ""
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        heading = head.lstrip("# ")
        title = title or heading
        if body.strip():
            yield (heading if heading == title else f"{title}: {heading}"), body.strip()
