"""A progress bar with the time left, drawn by rich where it is wanted and somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(title: str, total: float, *, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """Yield a function that is told each bit of work done; rich is only imported where a bar is shown."""
    if not shown or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(title, total=total)
        yield lambda amount: drawn.advance(task, amount)


class Listener:
    """What long work tells while it runs; this one does not listen."""

    def begin(self, total: float) -> None:
        """The total work."""

    def advance(self, amount: float) -> None:
        """A bit of work done; a negative amount was in vain."""

    def note(self, text: str) -> None:
        """What the user should know: a halved batch, a method left out, a damaged shard."""
