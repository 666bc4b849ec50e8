"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it when the block ends, and is removed if the block fails.

    Its name is `path`'s with a dot and something random before it: processes on several machines, where even process
    numbers may be equal, do not meet.

    Args:
        path: Target; its folder is made, a previous file stays until the new one is whole.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "greeting.txt"
        >>> with atomic(target) as temporary:
        ...     _ = temporary.write_text("hello")
        >>> target.read_text()
        'hello'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(6)}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
