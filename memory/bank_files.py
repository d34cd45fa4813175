"""Checksums of a bank's files. LanceDB has none, but it never changes a file of data or of a version once written."""

from __future__ import annotations

import os
from pathlib import Path

from memory.bank_table import TABLE
from memory.protocol import BankError
from runtime.checksums import SUMS, RecordError, check_file, parse_sums, record_files

DATA, VERSIONS = f"{TABLE}.lance/data", f"{TABLE}.lance/_versions"


class BankFiles:
    """The checksums in a bank's SHA256SUMS. A file that a kill left without one gets it with the next write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = set[str]()  # files that were checked, or written by this process
        self._read = 0  # bytes of SHA256SUMS that were read

    def check(self) -> None:
        """Check the files whose checksums were added since the last call. Raises: BankError, which names the file."""
        try:
            added = self._added()
            for name, digests in parse_sums(added, self.path / SUMS).items():
                if name not in self._known:
                    check_file(self.path, name, digests)
                    self._known.add(name)
            self._read += len(added)
        except RecordError as error:
            raise BankError(
                f"{self.path}: a file of the bank is missing or damaged: {error}; otherwise import an export into a "
                "new folder (memcompiler bank import)"
            ) from error

    def record(self) -> None:
        """Add the checksums of new versions, and of the files of data that these name.

        Other files of data may be ones that another process is writing, or of a write that it gave up.
        """
        versions = self._new(VERSIONS, ".manifest")
        named = b"".join((self.path / name).read_bytes() for name in versions)
        data = [name for name in self._new(DATA, ".lance") if Path(name).name.encode() in named]
        record_files(self.path, [*data, *versions])
        self._known.update(data, versions)

    def _added(self) -> bytes:
        """Read the complete lines that were added to SHA256SUMS."""
        try:
            with (self.path / SUMS).open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):  # no bank
            return b""
        return data[: data.rfind(b"\n") + 1]

    def _new(self, folder: str, suffix: str) -> list[str]:
        found = (f"{folder}/{name}" for name in sorted(os.listdir(self.path / folder)) if name.endswith(suffix))
        return [name for name in found if name not in self._known]
