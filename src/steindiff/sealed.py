"""Documents that know whether they are whole: JSON objects with a format version and a checksum."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its checksum."""
    return {**content, "sha256": checksum(content)}


def unseal(what: str, content: Any, version: int) -> dict[str, Any]:
    """The content without its checksum, once it has been found whole.

    Args:
        what: the document's kind, for the message.
        content: what was read.
        version: the only `format` that is accepted.

    Raises:
        ValueError: if it is no such document, of another version, or altered.
    """
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"not a {what}: the field 'format' is missing")
    if content["format"] != version:
        raise ValueError(f"format = {content['format']!r}: this version reads {version} only")
    body = {name: value for name, value in content.items() if name != "sha256"}
    if content.get("sha256") != checksum(body):
        raise ValueError("sha256: the content was altered or is damaged")
    return body
