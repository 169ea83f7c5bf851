"""Remote files on a node's disk, shared by all of its processes and bounded in bytes.

::

    FOLDER/ledger        at least the bytes in the folder; locked while files come and go
    FOLDER/bound         how many bytes may be in the folder, as last given by a cache with a bound of its own
    FOLDER/HASH          a whole file; a shared lock on it means that it is in use
    FOLDER/HASH.lock     a process is fetching this file; contains the number of bytes reserved for it
    FOLDER/HASH.part     the part of the file that has been fetched

All locks are the kernel's (``flock``). The kernel releases the locks of a process that ends, however it ends: a SIGKILL
needs no repair, and the next survey removes files that dead processes have left half-fetched. The cache reserves the
bytes of a file before it writes them, and renames a file into place when it is whole.

Use a folder on a local disk or in memory (ext4, xfs, tmpfs, overlayfs). On NFS, Linux sends ``flock`` to the server,
so the nodes would share one cache and one bound. With the mount options ``local_lock=flock`` or ``nolock`` it does not,
and the nodes would remove files under each other.

The cache knows neither datasets nor protocols: the caller says how to fetch a file.
"""

from raypipe.storage.node_cache.cache import CacheStats, FileCache, HeldFile
from raypipe.storage.node_cache.fetching import Fetch, Progress

__all__ = ["CacheStats", "Fetch", "FileCache", "HeldFile", "Progress"]
