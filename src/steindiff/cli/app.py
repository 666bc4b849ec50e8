"""The frame of the command line: finds the commands, reports mistakes in one line, turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import torch
import typer
from rich.markup import escape

import steindiff
from steindiff.cli import commands
from steindiff.cli.output import errors
from steindiff.cli.process_group import launched, process_group, speaker

MISTAKE, INTERRUPTED = 1, 130
"""Exit codes: something the user can mend (a wrong option has typer's own code 2); Ctrl-C, as shells have it."""


def version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        typer.echo(f"steindiff {steindiff.__version__}")
        raise typer.Exit


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Few-step diffusion sampling without retraining.

    Start with `steindiff compare`: the same seeds without and with SteinDiff, and the numbers.
    """
    name = str(context.invoked_subcommand)
    if launched() and not getattr(importlib.import_module(f"{commands.__name__}.{name}"), "TOGETHER", False):
        raise ValueError(f"{name}: runs in one process; leave torchrun out")
    context.with_resource(process_group())


def build() -> typer.Typer:
    """The application, with every command found in the folder."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for info in pkgutil.iter_modules(commands.__path__):
        module = importlib.import_module(f"{commands.__name__}.{info.name}")
        examples = "\n\n".join(f"`{example}`" for example in module.EXAMPLES)
        app.command(info.name, epilog=f"**Examples**\n\n{examples}")(module.command)
    return app


def explain(error: BaseException) -> str:
    """One line for one error: what was wrong, with which file."""
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, MemoryError) and not str(error)):
        return "out of memory: choose a smaller --batch or another --device"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    A mistake of the user's, or of a file of theirs, ends in one line. `STEINDIFF_DEBUG=1` shows the traceback too.
    """
    try:
        code = int(build()(list(arguments), prog_name="steindiff", standalone_mode=False) or 0)
    except typer.TyperException as error:
        if text := " ".join(error.format_message().split()):
            errors.print(f"[bold red]{speaker()}:[/] {escape(text)}", soft_wrap=True)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return MISTAKE
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        if os.environ.get("STEINDIFF_DEBUG"):
            raise
        errors.print(f"[bold red]{speaker()}:[/] {escape(explain(error))}", soft_wrap=True)
        return MISTAKE
    if code == INTERRUPTED:  # typer, too, turns Ctrl-C into this code
        errors.print(f"[bold red]{speaker()}:[/] interrupted; what was written is whole")
    return code


def main() -> NoReturn:
    """The entry point of the `steindiff` script."""
    sys.exit(run(sys.argv[1:]))
