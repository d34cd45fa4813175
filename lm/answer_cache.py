"""The cache of an endpoint's answers with their costs: one SQLite file.

The file survives kill -9 and may be shared by processes of one machine. It stores hashes of requests, never the
requests or keys.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from configs.models import EndpointConfig

ANSWER = "answer"  # outcome of a request without a fault
LOCK_TIMEOUT_S = 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    request TEXT PRIMARY KEY, text TEXT NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    truncated INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS vectors (request TEXT PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS checksums (entry TEXT PRIMARY KEY, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS totals (
    model TEXT, role TEXT, outcome TEXT, n INTEGER NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    PRIMARY KEY (model, role, outcome)
);
"""


class EndpointStop(RuntimeError):
    """The client sends no further requests. The message names the cause and the next step; answers remain cached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer. Its text is data, never a template or code."""

    text: str
    tokens_in: int
    tokens_out: int
    truncated: bool = False  # the model reached the token limit


def price(config: EndpointConfig, tokens_in: int, tokens_out: int) -> float:
    """Return the price of tokens in the currency of the settings (per million tokens)."""
    return (tokens_in * config.price_in + tokens_out * config.price_out) / 1e6


class AnswerCache:
    """Cached answers by request key, and running totals of requests and tokens. Every change is one transaction.

    Args:
        path: the file, created with its folder; None caches in memory.
        model: the model of the totals.

    Raises:
        EndpointStop: the file is unusable.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self.path, self.model = path, model
        with self._clear_errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _connect(path or ":memory:")

    def answer(self, key: str) -> Answer | None:
        """Return the cached answer to a request; None if there is none."""
        rows = self._rows(
            "SELECT text, tokens_in, tokens_out, truncated, crc FROM answers "
            "LEFT JOIN checksums ON entry = 'answer ' || request WHERE request = ?",
            key,
        )
        for *values, crc in rows:
            self._check(crc, key, *values)
            text, read, written, cut = values
            return Answer(text, read, written, bool(cut))
        return None

    def keep(self, key: str, role: str, answer: Answer) -> Answer:
        """Store and count an answer; return the stored one, which another process may have written first."""
        with self._clear_errors(), self._db:  # one transaction
            self._db.execute("BEGIN IMMEDIATE")
            self.count(role, ANSWER, answer.tokens_in, answer.tokens_out)
            if (known := self.answer(key)) is None:
                self._rows("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", key, *astuple(answer))
                values = (answer.text, answer.tokens_in, answer.tokens_out, int(answer.truncated))
                self._rows("INSERT OR REPLACE INTO checksums VALUES (?, ?)", f"answer {key}", _crc(key, *values))
        return known or answer

    def vectors(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the cached vectors by key."""
        marks = ", ".join("?" * len(keys))
        rows = self._rows(
            "SELECT request, vector, crc FROM vectors LEFT JOIN checksums ON entry = 'vector ' || request "
            f"WHERE request IN ({marks})",
            *keys,
        )
        for key, vector, crc in rows:
            self._check(crc, key, vector)
        return {key: vector for key, vector, _ in rows}

    def keep_vectors(self, vectors: Mapping[str, bytes], role: str, tokens: int) -> dict[str, bytes]:
        """Store the vectors of one request and count it; return the stored vectors."""
        with self._clear_errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self.count(role, ANSWER, tokens)
            self._db.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", vectors.items())
            stored = self.vectors(list(vectors))
            sums = [(f"vector {key}", _crc(key, vector)) for key, vector in stored.items()]
            self._db.executemany("INSERT OR IGNORE INTO checksums VALUES (?, ?)", sums)
        return stored

    def count(self, role: str, outcome: str, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Count a request by its outcome, with its tokens."""
        self._rows(
            "INSERT INTO totals VALUES (?, ?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET n = n + 1, "
            "tokens_in = tokens_in + excluded.tokens_in, tokens_out = tokens_out + excluded.tokens_out",
            self.model,
            role,
            outcome,
            tokens_in,
            tokens_out,
        )

    def spent(self) -> tuple[int, int]:
        """Return this model's input and output tokens over all runs and processes that share the file."""
        sums = "COALESCE(SUM(tokens_in), 0), COALESCE(SUM(tokens_out), 0)"
        [(read, written)] = self._rows(f"SELECT {sums} FROM totals WHERE model = ?", self.model)
        return read, written

    def totals(self) -> list[tuple[str, str, int, int, int]]:
        """Return model, role, requests, input and output tokens of every total."""
        return self._rows("SELECT model, role, n, tokens_in, tokens_out FROM totals ORDER BY model, role, outcome")

    def account(self, config: EndpointConfig) -> dict[str, Any]:
        """Return requests, answers, faults by kind, tokens and price, in all and by role, as JSON values."""
        columns = "role, outcome, n, tokens_in, tokens_out"
        rows = self._rows(f"SELECT {columns} FROM totals WHERE model = ? ORDER BY role, outcome", self.model)
        faults, whole = Counter[str](), Counter[str](requests=0, answers=0, tokens_in=0, tokens_out=0)
        roles: dict[str, Counter[str]] = {}
        for role, outcome, n, read, written in rows:
            counts = {"requests": n, "answers": n * (outcome == ANSWER), "tokens_in": read, "tokens_out": written}
            whole.update(counts)
            roles.setdefault(role, Counter()).update(counts)
            if outcome != ANSWER:
                faults[outcome] += n

        def priced(counts: Counter[str]) -> dict[str, Any]:
            return {**counts, "price": price(config, counts["tokens_in"], counts["tokens_out"])}

        by_role = {role: priced(counts) for role, counts in roles.items()}
        return {"model": self.model, **priced(whole), "faults": dict(sorted(faults.items())), "roles": by_role}

    def _rows(self, statement: str, *values: object) -> list[Any]:
        with self._clear_errors():
            return self._db.execute(statement, values).fetchall()

    def _check(self, crc: int | None, *values: object) -> None:
        """Compare an entry with its checksum; those of earlier versions have none. Raises: EndpointStop."""
        if crc is not None and crc != _crc(*values):
            raise EndpointStop(
                f"the answer cache in {self.path or 'memory'} is damaged (the checksum of an answer is another one): "
                "delete the file, or name another one (api.cache)"
            )

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise EndpointStop(
                f"the answer cache in {self.path or 'memory'} cannot be read or written ({error}): check that the disk "
                "has room, or name another file (api.cache)"
            ) from error


def _crc(*values: object) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def read_totals(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return the requests and tokens of a cache file by model and role; nothing without a file.

    Raises:
        EndpointStop: the file is unusable.
    """
    found: dict[str, dict[str, Counter[str]]] = {}
    for model, role, n, read, written in AnswerCache(path, "").totals() if path.exists() else ():
        counts = {"requests": n, "tokens_in": read, "tokens_out": written}
        found.setdefault(model, {}).setdefault(role, Counter()).update(counts)
    return {model: {role: dict(counts) for role, counts in roles.items()} for model, roles in found.items()}


def _is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@retry(
    retry=retry_if_exception(_is_busy), wait=wait_random(0, 0.05), stop=stop_after_delay(LOCK_TIMEOUT_S), reraise=True
)
def _connect(path: Path | str) -> sqlite3.Connection:
    """Open or create the file. SQLite's time-out does not cover the switch of a new file to WAL, which fails at once
    while another process opens the file: retry."""
    db = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
    except BaseException:
        db.close()
        raise
    return db
