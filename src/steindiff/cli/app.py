"""The frame of the command line: finds the commands, reports mistakes in one line, turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NoReturn

import torch
import typer

import steindiff
from steindiff.cli import commands
from steindiff.cli.output import fail, print_json
from steindiff.cli.process_group import launched, process_group

MISTAKE, INTERRUPTED = 1, 130
"""Exit codes: something the user can mend (a wrong option has typer's own code 2); Ctrl-C, as shells have it."""


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse options without a value: an empty path would be the current folder."""
    for option, value in pairwise([*arguments, "-"]):
        if option.startswith("--") and (value == "" or option.endswith("=")):
            raise ValueError(f"{option.rstrip('=')} must not be empty")


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Few-step diffusion sampling without retraining.

    Start with `steindiff compare`: the same seeds without and with SteinDiff, and the numbers.
    """
    name = str(context.invoked_subcommand)
    if launched() and not getattr(importlib.import_module(f"{commands.__name__}.{name}"), "TOGETHER", False):
        raise ValueError(f"{name}: runs in one process; leave torchrun out")
    context.with_resource(process_group())


def build(only: str | None = None) -> typer.Typer:
    """The application, with every command found in the folder, or with one of them: each imports what it needs."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    names = [info.name for info in pkgutil.iter_modules(commands.__path__)]
    for name in [only] if only in names else names:
        module = importlib.import_module(f"{commands.__name__}.{name}")
        examples = "\n\n".join(f"`{example}`" for example in module.EXAMPLES)
        app.command(name, epilog=f"**Examples**\n\n{examples}")(module.command)
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

    A mistake of the user's, or of a file of theirs, ends in one line on stderr; with `--json` also in one document on
    stdout, `{"error": …, "kind": …}`. `STEINDIFF_DEBUG=1` shows the traceback too.
    """
    arguments = list(arguments)
    if arguments[:1] == ["--version"]:  # at once, without looking for commands
        print(f"steindiff {steindiff.__version__}")
        return 0
    command = next((argument for argument in arguments if not argument.startswith("-")), None)

    def end(kind: str, message: str) -> None:
        fail(message)
        if "--json" in arguments and not launched():  # of several processes one prints the result
            print_json({"error": message, "kind": kind})

    try:
        refuse_empty(arguments)
        code = int(build(command)(arguments, prog_name="steindiff", standalone_mode=False) or 0)
    except typer.TyperException as error:
        if text := " ".join(error.format_message().split()):
            end(type(error).__name__, text)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return MISTAKE
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        if os.environ.get("STEINDIFF_DEBUG"):
            raise
        end(type(error).__name__, explain(error))
        return MISTAKE
    if code == INTERRUPTED:  # typer, too, turns Ctrl-C into this code
        end("KeyboardInterrupt", "interrupted; what was written is whole")
    return code


def main() -> NoReturn:
    """The entry point of the `steindiff` script."""
    sys.exit(run(sys.argv[1:]))
