"""Files that appear whole or not at all, in folders checked before work is spent."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError names `path`, not the temporary file or none at all."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: if the folder cannot be written to or the disk is full; it names `path`.
    """
    with naming(path), atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def folder(path: Path) -> Path:
    """Create a folder where missing and make sure that files can be written to it, before work is spent.

    Raises:
        OSError: if that is not so; it names `path`.
    """
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    return path
