"""Where a bank's table is: in the bank's folder, or in object storage that a file in the folder names.

    bank/store.json      {"uri": "s3://bucket/banks/homes", "options": {"aws_region": "eu-central-1"}}

Keys are never stored: LanceDB reads AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from memory.protocol import BankError
from runtime.store import read_json, to_json, write_atomically

STORE = "store.json"
_URI = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/[^\s?#]+")
_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Store:
    """Object storage: `s3://BUCKET/PREFIX`, and LanceDB's `storage_options` without keys."""

    uri: str
    options: Mapping[str, str]

    def __post_init__(self) -> None:
        if not _URI.fullmatch(self.uri):
            raise BankError(f"{self.uri!r} names no object storage: expected s3://BUCKET/PREFIX")
        if named := next((name for name in self.options if _SECRET.search(name)), None):
            raise BankError(f"option {named} is a secret: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")


def store_of(path: Path) -> Store | None:
    """Return the object storage that holds a bank's table; None for a table in the bank's folder.

    Raises: BankError, for a damaged or wrong store.json.
    """
    if not (file := path / STORE).is_file():
        return None
    try:
        told = read_json(file)
        return Store(str(told["uri"]), {str(name): str(value) for name, value in told["options"].items()})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BankError):
            raise
        raise BankError(f"{file} is damaged: {error}") from error


def create_store(path: Path, store: Store) -> None:
    """Create a bank's folder whose table is in object storage. Raises: BankError, for a folder that is not empty."""
    if path.exists() and any(path.iterdir()):
        raise BankError(f"{path} is not empty: name a new folder")
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / STORE, to_json(asdict(store)))
