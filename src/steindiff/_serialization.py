r"""Frozen dataclasses as readable JSON and back: `{"kind": "Karras", "rho": 7.0, …}`.

Only classes found by walking a package can be revived, and only through their own checks: a file never runs code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, TypeVar

T = TypeVar("T")


def to_config(thing: Any) -> dict[str, Any]:
    """The class name and the constructor arguments of a frozen dataclass."""
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return {"kind": type(thing).__name__, **fields}


def from_config(argument: str, description: Any, table: dict[str, type[T]]) -> T:
    """Rebuild what `to_config` wrote.

    Raises:
        ValueError: if the description names an unknown kind or does not fit its constructor.
    """
    if not isinstance(description, dict) or description.get("kind") not in table:
        kind = description.get("kind") if isinstance(description, dict) else description
        raise ValueError(f"{argument}: kind = {kind!r}, allowed are {', '.join(sorted(table))}")
    cls = table[description["kind"]]
    arguments = {name: freeze(value) for name, value in description.items() if name != "kind"}
    allowed = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    if not set(arguments) <= allowed:
        raise ValueError(
            f"{argument}: unknown fields {sorted(set(arguments) - allowed)}, allowed are {sorted(allowed)}"
        )
    try:
        return cls(**arguments)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{argument}: {error}") from None


def freeze(value: Any) -> Any:
    """JSON's lists as tuples, all the way down."""
    return tuple(freeze(v) for v in value) if isinstance(value, list) else value


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its checksum."""
    return {**content, "sha256": checksum(content)}


def verified(what: str, content: Any, *versions: int) -> dict[str, Any]:
    """The content without its checksum, once it has been found whole.

    Args:
        what: the document's kind, for the message.
        content: what was read.
        versions: values of `format` that are accepted.

    Raises:
        ValueError: if it is another kind of document, of another version, or altered.
    """
    if not isinstance(content, dict) or "format" not in content or "sha256" not in content:
        raise ValueError(f"not a {what}: it must be a JSON object with 'format' and 'sha256'")
    if isinstance(content["format"], bool) or content["format"] not in versions:
        known = " and ".join(map(str, versions))
        raise ValueError(f"format = {content['format']!r}: this version reads {what}s of format {known}")
    body = {name: value for name, value in content.items() if name != "sha256"}
    if content["sha256"] != checksum(body):
        raise ValueError("sha256 does not match: the content was altered or is damaged")
    return body


def finite(name: str, value: Any) -> tuple[float, ...]:
    """A list of finite numbers; text, booleans and NaN are refused."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of numbers, got {type(value).__name__}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int | float) or not abs(item) < 1e308:
            raise ValueError(f"{name} must hold finite numbers, got {str(item)[:40]!r}")
    return tuple(map(float, value))
