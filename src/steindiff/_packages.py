"""Which packages are installed here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str | None:
    """Version of a package, None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
