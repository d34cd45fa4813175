"""What a model behind an endpoint has answered, and what that cost: one SQLite file.

It survives kill -9 at any moment and may be shared by processes of one machine. It holds hashes of requests, never the
requests, and no key.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from configs.models import EndpointConfig
from lm.replies import answer_text

ANSWER = "answer"  # the outcome that is no fault
WAIT_S = 60.0  # for other processes
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    request TEXT PRIMARY KEY, text TEXT NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    truncated INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS vectors (request TEXT PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS totals (
    model TEXT, role TEXT, outcome TEXT, n INTEGER NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    PRIMARY KEY (model, role, outcome)
);
"""


class EndpointStop(RuntimeError):
    """No further request is sent. The message says why and what to do; what was answered is kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text is data: it is never run, formatted or used as a template."""

    text: str
    tokens_in: int
    tokens_out: int
    truncated: bool = False  # the model stopped at the limit of tokens


def price(config: EndpointConfig, tokens_in: int, tokens_out: int) -> float:
    """Return what tokens cost, in the currency of the settings' prices per million."""
    return (tokens_in * config.price_in + tokens_out * config.price_out) / 1e6


class Ledger:
    """Answers by request, and running totals of what was sent; every change is one transaction.

    Args:
        path: of the file, made with its folder; None keeps everything in memory.
        model: whose totals are read and written.

    Raises:
        EndpointStop: the file cannot be used. The message says what to do.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self.path, self.model = path, model
        with self._clear_errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _connect(path or ":memory:")

    def answer(self, key: str) -> Answer | None:
        """Return what was answered to the request with this key, None where nothing usable was: earlier versions stored
        answers with their reasoning, and empty ones."""
        rows = self._rows("SELECT text, tokens_in, tokens_out, truncated FROM answers WHERE request = ?", key)
        found = (Answer(answer_text(text), read, written, bool(cut)) for text, read, written, cut in rows)
        return next((answer for answer in found if answer.text), None)

    def keep(self, key: str, role: str, answer: Answer) -> Answer:
        """Store and count an answer. Returns what the file holds: another process may have been first."""
        with self._clear_errors(), self._db:  # one transaction
            self._db.execute("BEGIN IMMEDIATE")
            self.count(role, ANSWER, answer.tokens_in, answer.tokens_out)
            if (known := self.answer(key)) is None:
                self._rows("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", key, *astuple(answer))
        return known or answer

    def vectors(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the vectors that are known, by key."""
        marks = ", ".join("?" * len(keys))
        return dict(self._rows(f"SELECT request, vector FROM vectors WHERE request IN ({marks})", *keys))

    def keep_vectors(self, vectors: Mapping[str, bytes], role: str, tokens: int) -> dict[str, bytes]:
        """Store what one request answered, and count it once. Returns what the file holds."""
        with self._clear_errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self.count(role, ANSWER, tokens)
            self._db.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", vectors.items())
        return self.vectors(list(vectors))

    def count(self, role: str, outcome: str, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Count a request by its outcome, and what was paid for it."""
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
        """Return the tokens read and written by this model, over all runs and processes that share the file."""
        sums = "COALESCE(SUM(tokens_in), 0), COALESCE(SUM(tokens_out), 0)"
        [(read, written)] = self._rows(f"SELECT {sums} FROM totals WHERE model = ?", self.model)
        return read, written

    def account(self, config: EndpointConfig) -> dict[str, Any]:
        """Return requests, answers, faults by kind, tokens and price, in all and by role, ready for JSON."""
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

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise EndpointStop(
                f"the answers in {self.path or 'memory'} cannot be read or written ({error}): see that the disk has "
                "room, or name another file (api.cache)"
            ) from error


def _is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@retry(retry=retry_if_exception(_is_busy), wait=wait_random(0, 0.05), stop=stop_after_delay(WAIT_S), reraise=True)
def _connect(path: Path | str) -> sqlite3.Connection:
    """Open or make the file. SQLite's own time-out does not cover a new file's switch to WAL: where other processes
    open it at the same moment, that fails at once and is tried again."""
    db = sqlite3.connect(path, timeout=WAIT_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
    except BaseException:
        db.close()
        raise
    return db
