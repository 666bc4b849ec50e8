"""Files that appear whole or not at all, in folders checked before work is spent."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

try:
    import fcntl
except ImportError:  # not on this system: nothing is locked, so nothing is swept either
    fcntl = None  # type: ignore[assignment]

PREFIX, SUFFIX = ".steindiff-", ".part"
"""How names of unfinished files and folders begin and end: hidden, and of no kind that a reader of images looks for."""


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _lock(path: Path) -> int | None:
    """A descriptor that holds `path` against `sweep` until it is closed; None if another process holds it, or it went.

    Locks end with their process, however it ends, so what is not locked was left behind.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # held by another, or swept meanwhile
        pass
    except OSError:  # a file system without locks
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def unfinished(folder: Path, *, directory: bool = False) -> Iterator[Path]:
    """The path of a new empty file, or directory, in `folder`; what is left of it when the block ends is removed."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        path.mkdir() if directory else path.touch(exist_ok=False)
        with suppress(FileNotFoundError):
            if (descriptor := _lock(path)) is not None:
                break
    try:
        yield path
    finally:
        os.close(descriptor)
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder, and nothing that a living one is writing."""
    if fcntl is None:
        return
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):  # gone meanwhile, or not ours to remove
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(descriptor)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it when the block ends, and is removed if the block fails.

    Its name is random, hidden and of no kind a reader looks for, and it is locked while the block lasts: processes on
    one folder, also on several machines, do not disturb each other, and `sweep` removes what a killed one left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path.parent) as temporary:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable and os.name == "posix":
            _sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError names `path`, not the temporary file or none at all."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically."""
    with naming(path), atomic(path, durable=durable) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def folder(path: Path) -> Path:
    """Create a folder where missing and make sure that files can be written to it, before work is spent.

    What a killed run left unfinished in it is removed.
    """
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    sweep(path)
    return path
