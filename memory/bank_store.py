"""Where a bank is: a folder, or an address s3://BUCKET/PREFIX on an S3-compatible object store.

Credentials, region and endpoint of a store come from the environment alone, by the names of AWS's own tools.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from memory.protocol import BankError

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")  # AWS_SESSION_TOKEN, if they are temporary
ENDPOINT = "AWS_ENDPOINT_URL"  # of a store that is not Amazon's
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_AS_PATH = re.compile(r"s3:/(?!/)")  # what pathlib makes of an address


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a bank on an object store."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    def options(self) -> dict[str, str]:
        """Return LanceDB's options of the connection; it reads the other variables itself.

        Raises: BankError, if the environment holds no keys, or no valid endpoint."""
        if missing := [name for name in KEYS if not os.environ.get(name)]:
            raise BankError(f"{self}: set {' and '.join(missing)} in the environment")
        endpoint = os.environ.get(ENDPOINT, "")
        if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname):
            raise BankError(f"{self}: {ENDPOINT} is {endpoint!r}, and must be a URL such as https://store.example:9000")
        return {"allow_http": "true"} if endpoint.startswith("http://") else {}


Place = Path | StoreAddress


def place_of(where: str | Place) -> Place:
    """Return the folder or the address that a text names. Raises: BankError, for an address of another form."""
    text = str(where)
    if isinstance(where, StoreAddress) or not (_URI.match(text) or _AS_PATH.match(text)):
        return where if isinstance(where, StoreAddress) else Path(where)
    if _AS_PATH.match(text):
        raise BankError(f"{text}: give the address of a store as text (s3://BUCKET/PREFIX), not as a path")
    scheme, _, rest = text.partition("://")
    if scheme != "s3":
        raise BankError(f"{text}: banks are in folders, or on object stores at s3://BUCKET/PREFIX")
    bucket, _, prefix = rest.strip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or not prefix or re.search(r"//|[?#\s]", prefix):
        raise BankError(f"{text}: not an address of the form s3://BUCKET/PREFIX")
    return StoreAddress(f"s3://{bucket}/{prefix}")
