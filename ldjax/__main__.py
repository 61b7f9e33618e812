"""`python -m ldjax`."""

from ldjax import cli

cli.main()
