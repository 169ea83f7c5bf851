"""``python -m raypipe``: the command line, for where the ``raypipe`` program is not on the path."""

from raypipe.cli import main

main()
