"""`python -m steindiff.cli`."""

from steindiff.cli.app import main

main()
