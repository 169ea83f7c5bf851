"""Datasets on the Hugging Face Hub: pinned to a commit, found in its cache, fetched whole or read by range.

::

    names.py      owner/name and hf://datasets/... as values                      HubSource, is_repo_id
    client.py     requests within the budget: retries, Retry-After                Client
    cache.py      the layout of the Hub's cache: refs, listings, snapshots        find_snapshot, HubPlace
    resolve.py    resolves a revision to a commit                                 resolve
    receive.py    one file, continued after a break and verified                  Receiver
    fetch.py      what `raypipe download` puts in place, verified; the listing     fetch_files, list_files
    files.py      what a run reads: whole files, verified by hash, or ranges      HubFiles

huggingface_hub reads the variables ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``. Nothing here
knows what a LeRobot dataset is.
"""

from raypipe.storage.hub.cache import HubFile, HubPlace, cache_place, find_snapshot, folder_place
from raypipe.storage.hub.client import Client
from raypipe.storage.hub.fetch import Fetched, fetch_files, list_files
from raypipe.storage.hub.files import HubFiles, open_files
from raypipe.storage.hub.names import HubSource, is_repo_id, leaves_folder, parse_pinned
from raypipe.storage.hub.resolve import resolve

__all__ = [
    "Client",
    "Fetched",
    "HubFile",
    "HubFiles",
    "HubPlace",
    "HubSource",
    "cache_place",
    "fetch_files",
    "find_snapshot",
    "folder_place",
    "is_repo_id",
    "leaves_folder",
    "list_files",
    "open_files",
    "parse_pinned",
    "resolve",
]
