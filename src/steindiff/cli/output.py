"""What commands print: results on stdout, everything else on stderr and only where somebody is looking.

Rich is imported when something is printed with it, so that `--version` and `--json` do without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steindiff._distributed import rank
from steindiff._progress import Listener
from steindiff.cli.process_group import speaker

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@cache
def console(*, stderr: bool = False) -> Console:
    """The console of stdout or stderr. Rich drops colours and boxes' control codes by itself where it is a pipe."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def text(value: object) -> str:
    """Anything as plain text for a console: its brackets are not markup."""
    from rich.markup import escape

    return escape(str(value))


def show(*renderables: Any) -> None:
    """Print something of rich's, or text with its markup, to stdout."""
    console().print(*renderables)


def written(path: Path, remark: str = "") -> None:
    """Say which file or folder was written, and a remark about it."""
    console().print(f"[bold]{text(path)}[/]{text(remark)}", soft_wrap=True)


def note(remark: str) -> None:
    """Something worth knowing that is not the result."""
    console(stderr=True).print(f"[yellow]{speaker()}:[/] {text(remark)}", soft_wrap=True)


def fail(message: str) -> None:
    """Why the command ends without a result."""
    console(stderr=True).print(f"[bold red]{speaker()}:[/] {text(message)}", soft_wrap=True)


def print_json(value: Any) -> None:
    """The result for machines: one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@contextmanager
def progress() -> Iterator[Progress]:
    """A live progress bar with the time left; silent where stderr is not a terminal, and in all processes but one."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("left"),
    )
    silent = not console(stderr=True).is_terminal or rank().rank > 0
    bar = Progress(*columns, console=console(stderr=True), transient=True, disable=silent)
    with nullcontext() if silent else bar:  # a silent one would still end in a newline, before rich 15
        yield bar


class Watch(Listener):
    """Shows progress on a bar, and notes."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def begin(self, total: float) -> None:
        self.bar.update(self.task, total=round(total))

    def advance(self, amount: float) -> None:
        self.bar.advance(self.task, amount)

    def note(self, text: str) -> None:
        note(text)
