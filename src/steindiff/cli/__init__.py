"""The command line, `steindiff`. Commands are the files of `steindiff.cli.commands`, one each."""

from steindiff.cli.app import main

__all__ = ["main"]
