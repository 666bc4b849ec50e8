r"""Frozen dataclasses as readable JSON and back: `{"kind": "Karras", "rho": 7.0, …}`.

Only classes found by walking a package can be revived, and only through their own checks: a file never runs code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def to_config(thing: Any) -> dict[str, Any]:
    """The class name and the constructor arguments of a frozen dataclass."""
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return {"kind": type(thing).__name__, **fields}


def kinds(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """All concrete dataclasses derived from `base` in a module, or in the modules of a package."""
    modules = [module]
    if hasattr(module, "__path__"):
        modules = [
            importlib.import_module(f"{module.__name__}.{m.name}") for m in pkgutil.iter_modules(module.__path__)
        ]
    classes = [v for m in modules for v in vars(m).values() if isinstance(v, type) and issubclass(v, base)]
    return {
        cls.__name__: cls
        for cls in classes
        if dataclasses.is_dataclass(cls) and not getattr(cls, "__abstractmethods__", None)
    }


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


def verified(what: str, content: Any, version: int) -> dict[str, Any]:
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
