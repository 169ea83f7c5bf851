"""``python -m raypipe``: the command line, for where the ``raypipe`` program is not on the path."""

from importlib import import_module

import_module("raypipe.cli").main()
