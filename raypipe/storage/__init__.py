"""Names to bytes: a local path, a commit of the Hub, or any fsspec URI, behind one small object, `Storage`.

The modules, from the top down (each may use those below it)::

    root.py            the root of a dataset: names in, bytes out                          Storage, open_storage
    protocols.py       which roots may be opened at all                                    check_root, is_plain_path
    remote.py          the listing of a remote root, and how its bytes are fetched         Remote
    bodies.py          bodies from S3 and web servers; gives up one that comes too slowly  S3Objects, WebFiles
    retry.py           reads tried again, above the Hub's own retries and for bad copies   retry_transient, read_twice
    hub/               datasets of the Hugging Face Hub, pinned to a commit;               HubFiles, fetch_files
                       requests within the budget; what happens on 429 and 503
    copies.py          settings of the node's cache; remote files opened through it,       CacheSpec, RangedFile
                       whole or by parts
    node_cache.py      remote files on a node's disk                                       FileCache
    cache_folder.py    the folder of the node's cache: its bytes, and which files are      CacheFolder
                       removed for room
    request_budget.py  counts requests, and delays them to keep a budget, that of a        Budget, share_gate
                       process or of a Ray cluster
    local_files.py     locks on files; names inside a folder; files written whole          lock_file, write_whole

The node's cache fetches a small remote file whole, and only the parts in use of a large one; see
`CacheSpec.is_fetched_whole`. Nothing here knows what the files mean.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.storage.copies import CacheSpec, RangedFile, open_cache
    from raypipe.storage.hub.cache import (
        HubFile,
        HubPlace,
        HubSource,
        cache_place,
        folder_place,
        is_repo_id,
        locked,
        parse_pinned,
        resolve,
    )
    from raypipe.storage.hub.client import Client
    from raypipe.storage.hub.files import HubFiles, fetch_files, list_files
    from raypipe.storage.local_files import check_file, check_writable, inside, save_figure, write_whole
    from raypipe.storage.node_cache import FileCache
    from raypipe.storage.protocols import check_root, is_plain_path, login_of, open_filesystem_of, take_login
    from raypipe.storage.remote import REFUSED, remote_stamp
    from raypipe.storage.request_budget import num_requests, share_gate
    from raypipe.storage.retry import is_transient, retry_transient
    from raypipe.storage.root import Storage, open_root, open_storage
else:
    __all__, __getattr__ = lazy_names(__name__)
