"""`python -m shoal` is the command `shoal`."""

from shoal.cli.main import main

main()
