"""What commands print: results on stdout, everything else on stderr and only where somebody is looking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from steindiff._distributed import rank
from steindiff.cli.process_group import speaker

results = Console(highlight=False)
"""Stdout. Rich drops colours and boxes' control codes by itself where this is a pipe."""
errors = Console(stderr=True, highlight=False)
"""Stderr."""


def note(text: str) -> None:
    """Something worth knowing that is not the result."""
    errors.print(f"[yellow]{speaker()}:[/] {escape(text)}", soft_wrap=True)


def escaped(text: object) -> str:
    """Text of the user's, such as a path, so that rich prints it and does not read markup in it."""
    return escape(str(text))


def print_json(value: Any) -> None:
    """The result for machines: one JSON document on stdout."""
    results.file.write(json.dumps(value, indent=1) + "\n")


@contextmanager
def progress() -> Iterator[Progress]:
    """A live progress bar with the time left; silent where stderr is not a terminal, and in all processes but one."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("left"),
    )
    silent = not errors.is_terminal or rank().rank > 0
    with Progress(*columns, console=errors, transient=True, disable=silent) as bar:
        yield bar
