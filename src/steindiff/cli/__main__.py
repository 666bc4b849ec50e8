"""`python -m steindiff.cli`."""

from steindiff.cli.frame import main

main()
