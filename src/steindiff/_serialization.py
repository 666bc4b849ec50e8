r"""JSON as typed Python: frozen dataclasses out of `{"kind": "Karras", "rho": 7.0, …}`, and back.

`decode` checks a value against a type annotation, so a class's own annotations are the schema of its file. Only classes
found by walking a package can be revived, and only through their own checks: a file never runs code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from steindiff._checks import finite, integer, shown

T = TypeVar("T")

LARGEST_FILE = 64 * 2**20
"""Bytes of the largest JSON document that is read."""


def decode(name: str, value: Any, kind: Any) -> Any:
    """What JSON gave, as the type an annotation names; nothing is converted but whole numbers to floats.

    Lists become tuples, objects dataclasses or dicts, lists of the right length named tuples. Whole numbers are below
    2⁶³, floats finite. `Annotated[int, Within(1)]` adds bounds, any callable of name and value does.

    Example:
        >>> decode("shape", [3, 32], tuple[int, ...])
        (3, 32)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is int:
        return integer(name, value)
    if kind is float:
        return finite(name, value)
    if kind in (str, bool, types.NoneType, None):
        expected = types.NoneType if kind is None else kind
        return value if type(value) is expected else _refuse(name, value, SPELLED[expected])
    if origin is Annotated:
        inner, *checks = arguments
        out = decode(name, value, inner)
        for check in checks:
            check(name, out)
        return out
    if origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
        return value if fits else _refuse(name, value, f"one of {', '.join(map(repr, arguments))}")
    if origin in (Union, types.UnionType):
        return _either(name, value, arguments)
    if origin in (tuple, list, Sequence):
        return _sequence(name, value, arguments)
    if origin in (dict, Mapping):
        return {key: decode(f"{name}.{key[:40]}", item, arguments[1]) for key, item in _object(name, value).items()}
    if isinstance(kind, type) and issubclass(kind, tuple):
        defaults: dict[str, Any] = getattr(kind, "_field_defaults", {})
        given = len(value) if isinstance(value, list | tuple) else 0
        hints = list(_hints(kind).values())  # of a named tuple; the last fields may have defaults
        return kind(*_sequence(name, value, tuple(hints[: max(given, len(hints) - len(defaults))])))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return record(name, _object(name, value), kind)
    raise ValueError(f"{name} cannot be read from a file: no rule reads {kind}")


SPELLED = {str: "text", bool: "true or false", types.NoneType: "null"}


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shown(value)}")


def _object(name: str, value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(name, value, "an object")


def _either(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    for kind in others[:-1]:
        try:
            return decode(name, value, kind)
        except ValueError:
            continue
    return decode(name, value, others[-1])


def _sequence(name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        _refuse(name, value, "a list")
    if len(kinds) == 1 or kinds[1:] == (...,):
        if kinds[0] is float and all(type(item) is float and isfinite(item) for item in value):
            return tuple(value)  # thousands in a calibration, and sound as they are
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{name} must have {len(kinds)} entries, got {len(value)}")
    return tuple(decode(f"{name}[{i}]", item, kind) for i, (item, kind) in enumerate(zip(value, kinds, strict=True)))


@lru_cache(maxsize=256)
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def record(name: str, value: Mapping[str, Any], cls: type[T], **known: Any) -> T:
    """A dataclass from an object of its fields but the `known`; those without a default must be there, no others."""
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name not in known}  # type: ignore[arg-type]
    optional = {k for k, f in fields.items() if not f.default is f.default_factory is dataclasses.MISSING}
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{name} has unknown fields {shown(unknown)}; {cls.__name__} takes {sorted(fields)}")
    if missing := sorted(set(fields) - optional - set(value)):
        raise ValueError(f"{name} lacks the fields {missing} of {cls.__name__}")
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    arguments = {key: decode(f"{name}.{key}", item, hints[key]) for key, item in value.items()}
    try:
        return cls(**arguments, **known)
    except (TypeError, ArithmeticError) as error:  # a class's own check, surprised by what its types allow
        raise ValueError(f"{name}: {error}") from None


def to_config(thing: Any) -> dict[str, Any]:
    """The class name and the constructor arguments of a frozen dataclass."""
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return {"kind": type(thing).__name__, **fields}


def from_config(name: str, description: Any, table: Mapping[str, type[T]]) -> T:
    """Rebuild what `to_config` wrote; the annotations of the class are checked strictly."""
    arguments = dict(_object(name, description))
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str) or kind not in table:
        raise ValueError(f"{name}.kind must be one of {', '.join(sorted(table))}, got {shown(kind)}")
    return record(name, arguments, table[kind])


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its checksum."""
    return {**content, "sha256": checksum(content)}


def read_json(path: Path) -> Any:
    """Parse a JSON document; NaN and infinity are not numbers of JSON."""
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise ValueError(f"the file must have <= {LARGEST_FILE} bytes, got {size}")
    return parse_json(path.read_bytes())


def parse_json(data: bytes | str) -> Any:
    """As `read_json`, from memory."""
    try:
        return json.loads(data, parse_constant=lambda text: _refuse("every number", text, "finite"))
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def verified(what: str, content: Any, *versions: int) -> dict[str, Any]:
    """The content without its checksum, once it has been found whole."""
    if not isinstance(content, dict) or "format" not in content or "sha256" not in content:
        raise ValueError(f"not a {what}: it must be a JSON object with 'format' and 'sha256'")
    if type(content["format"]) is not int or content["format"] not in versions:
        known = " and ".join(map(str, versions))
        raise ValueError(f"format = {shown(content['format'])}: this version reads {what}s of format {known}")
    body = {name: value for name, value in content.items() if name != "sha256"}
    try:
        digest = checksum(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the content cannot be checked: {error}") from None
    if content["sha256"] != digest:
        raise ValueError("sha256 does not match: the content was altered or is damaged")
    return body
