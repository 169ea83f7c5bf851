"""A page in the browser to look through a dataset: ``raypipe show ROOT --serve``.

::

    server.py     HTTP on 127.0.0.1: routes, ranges, headers, access             serve, make_server
    site.py       the data that the page requests, as plain values               Site
    stills.py     frames as JPEG: batches, and videos that the browser cannot play    Stills
    checks.py     runs `raypipe validate` in a separate process                  Checks
    page/         the page itself: HTML, CSS and JavaScript, nothing to build

A dataset may come from a stranger: the page gets its texts as JSON and sets them as text, never as HTML. Addresses hold
only numbers, never a path.
"""

from raypipe.views.browse.server import make_server, serve
from raypipe.views.browse.site import Site

__all__ = ["Site", "make_server", "serve"]
