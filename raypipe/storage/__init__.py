"""Where files are: a local path, a commit of the Hub, or any fsspec URI, behind one small value.

::

    root.py       the root of a dataset: names in, bytes out                       Storage, open_storage, open_root
    protocols.py  which roots may be opened at all                                 check_root, is_plain_path
    spec.py       where a node keeps remote files, and how many bytes              CacheSpec
    remote.py     what a remote root lists, and how its bytes are fetched          Remote
    copies.py     the node's cache, and copies of which the data make no sense     open_cache, read_twice, check_file
    streams.py    files of a remote root, open for reading                         HeldStream, SizedFile
    ranged.py     a file of which only the parts in use are on the node            RangedFile
    web.py        files of a web server, of any size, at a pace                    WebFiles
    bodies.py     objects of S3, the same                                          fetch_object, read_object
    retry.py      what fails for a while is tried again by whoever reads           retry_transient

A remote file is fetched whole into the cache of the node where it is small, and by parts where it is large; see
`CacheSpec.is_fetched_whole`. Knows nothing of what the files mean.
"""

from raypipe.storage.copies import check_file, open_cache
from raypipe.storage.protocols import check_root, is_plain_path, login_of, open_filesystem_of, take_login
from raypipe.storage.ranged import RangedFile
from raypipe.storage.remote import REFUSED, remote_stamp
from raypipe.storage.retry import RETRY_WAITS_S, is_transient, retry_transient
from raypipe.storage.root import Storage, open_root, open_storage, walk_files
from raypipe.storage.spec import CacheSpec

__all__ = [
    "REFUSED",
    "RETRY_WAITS_S",
    "CacheSpec",
    "RangedFile",
    "Storage",
    "check_file",
    "check_root",
    "is_plain_path",
    "is_transient",
    "login_of",
    "open_cache",
    "open_filesystem_of",
    "open_root",
    "open_storage",
    "remote_stamp",
    "retry_transient",
    "take_login",
    "walk_files",
]
