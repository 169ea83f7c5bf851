"""A page in the browser to look through a dataset: ``raypipe show ROOT --serve``.

::

    server.py     HTTP on 127.0.0.1: routes, ranges, headers, who may ask        serve, make_server
    site.py       what the page asks for, as plain values                        Site
    stills.py     frames as JPEG: batches, and videos that the browser cannot play    Stills
    checks.py     what `raypipe validate` finds, in a process of its own         Checks
    page/         the page itself: HTML, CSS and JavaScript, nothing to build

A dataset is a stranger's: its texts reach the page as JSON and are set as text, never as HTML. Addresses hold numbers
alone, never a path.
"""

from raypipe.views.browse.server import make_server, serve
from raypipe.views.browse.site import Site

__all__ = ["Site", "make_server", "serve"]
