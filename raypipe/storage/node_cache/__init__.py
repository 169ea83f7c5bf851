"""Files of remote storage on a node's disk, shared by all of its processes and bounded in bytes.

::

    FOLDER/ledger        how many bytes are there at most; locked while files come and go
    FOLDER/bound         how many bytes may be there, as the last who fetched with a bound of its own was given
    FOLDER/HASH          a whole file; a shared lock on it means that it is in use
    FOLDER/HASH.lock     somebody fetches this file; holds the bytes that are reserved for it
    FOLDER/HASH.part     the file as far as it is fetched

All locks are the kernel's (``flock``), which drops those of a process that ends, however it ends: nothing needs to be
repaired after a SIGKILL, and what the dead have left half-fetched is removed by the next who looks. A file is renamed
into place when it is whole, and its bytes are reserved before they are written.

The folder belongs on a local disk or in memory (ext4, xfs, tmpfs, overlayfs). On NFS, Linux sends ``flock`` to the
server, so that the nodes would share one cache and one bound; a mount with ``local_lock=flock`` or ``nolock`` does not,
and nodes would then remove files under each other.

Knows neither datasets nor protocols: who calls says how a file is fetched.
"""

from raypipe.storage.node_cache.cache import CacheStats, FileCache, HeldFile
from raypipe.storage.node_cache.fetching import Fetch, Progress

__all__ = ["CacheStats", "Fetch", "FileCache", "HeldFile", "Progress"]
