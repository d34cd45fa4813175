"""Text that others wrote, where it becomes part of a line."""

import re

_NEWLINE = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # whatever str.splitlines takes for the end of a line


def without_newlines(text: str) -> str:
    """Turn every newline into one space."""
    return _NEWLINE.sub(" ", text)
