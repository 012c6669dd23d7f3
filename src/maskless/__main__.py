"""`python -m maskless` is the command line."""

from maskless.cli import main

main()
