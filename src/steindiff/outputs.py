"""A folder for results: checked before work is spent, its files written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from steindiff.files import atomic


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: if the folder cannot be written to or the disk is full; it names `path`.
    """
    try:
        with atomic(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    write_bytes(path, text.encode())


def folder(path: Path) -> Path:
    """Create a folder where missing and make sure that files can be written to it, before work is spent.

    Raises:
        OSError: if that is not so; it names `path`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    return path
