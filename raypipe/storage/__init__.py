"""Names to bytes: a local path, a commit of the Hub, or any fsspec URI, behind one small value.

::

    root.py             the root of a dataset: names in, bytes out                       Storage, open_storage
    protocols.py        which roots may be opened at all                                 check_root, is_plain_path
    spec.py             where a node keeps remote files, and how many bytes              CacheSpec
    remote.py           the listing of a remote root, and how its bytes are fetched      Remote
    streams.py          files of a remote root, open for reading                         HeldStream, SizedFile
    ranged.py           a remote file, only its parts in use kept on the node            RangedFile
    copies.py           copies of remote files on this node, and damaged ones            Copies, open_cache
    bodies.py           objects of S3, piece by piece; gives up one that is too slow     fetch_object
    web.py              files of a web server                                            WebFiles
    retry.py            readers retry faults that may pass                               retry_transient
    hub/                datasets of the Hugging Face Hub, pinned to a commit             HubFiles, fetch_files
    node_cache/         remote files on a node's disk, bounded in bytes                  FileCache
    request_budget.py   counts requests, and delays them to keep a budget                Budget, count_requests
    cluster_budget.py   one budget for all processes of a Ray cluster                    share_gate
    writing.py          writes a file whole or not at all; checks that it can            write_whole, check_writable

The node's cache fetches a small remote file whole, and only the parts in use of a large one; see
`CacheSpec.is_fetched_whole`. Nothing here knows what the files mean.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.storage.cluster_budget import share_gate
    from raypipe.storage.copies import check_file, open_cache
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
    from raypipe.storage.node_cache.cache import FileCache
    from raypipe.storage.protocols import check_root, is_plain_path, login_of, open_filesystem_of, take_login
    from raypipe.storage.ranged import RangedFile
    from raypipe.storage.remote import REFUSED, remote_stamp
    from raypipe.storage.request_budget import num_requests
    from raypipe.storage.retry import is_transient, retry_transient
    from raypipe.storage.root import Storage, open_root, open_storage
    from raypipe.storage.spec import CacheSpec
    from raypipe.storage.writing import check_writable, inside, save_figure, write_whole
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "cluster_budget": "share_gate",
            "copies": "check_file open_cache",
            "hub.cache": "HubFile HubPlace HubSource cache_place folder_place is_repo_id locked parse_pinned resolve",
            "hub.client": "Client",
            "hub.files": "HubFiles fetch_files list_files",
            "node_cache.cache": "FileCache",
            "protocols": "check_root is_plain_path login_of open_filesystem_of take_login",
            "ranged": "RangedFile",
            "remote": "REFUSED remote_stamp",
            "request_budget": "num_requests",
            "retry": "is_transient retry_transient",
            "root": "Storage open_root open_storage",
            "spec": "CacheSpec",
            "writing": "check_writable inside save_figure write_whole",
        },
    )
