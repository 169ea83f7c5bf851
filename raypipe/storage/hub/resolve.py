"""Resolves a revision to a commit, once, on the driver; every node then reads that commit."""

import os
from typing import Any, Final

from raypipe.errors import ConfigError, DownloadError, suggest
from raypipe.storage.hub.cache import cache_place, download_command, list_refs, read_listing, read_ref, write_ref
from raypipe.storage.hub.client import Client, HubRequest, is_offline, ref_names
from raypipe.storage.hub.names import HubName, HubSource, is_commit, parse_name, quote_name

FORMAT_TAGS: Final = ("v3.0", "v2.1", "v2.0")
"""The tags of the formats that raypipe reads, newest first."""

_MAIN: Final = "main"


def resolve(root: str, revision: str = "", *, is_fresh: bool = False, client: Client | None = None) -> HubSource:
    """Return the commit of a dataset on the Hub.

    A full SHA is used as it is. A format tag comes from the cache if the cache also has the listing of its commit, so
    that a second start sends no request. raypipe asks the Hub for any other tag or branch. With ``HF_HUB_OFFLINE`` only
    the cache is used.

    Args:
        root: ``owner/name``, or ``hf://datasets/owner/name``, also with ``@revision``.
        revision: a tag, branch or commit; empty for the newest tag of `FORMAT_TAGS`, else ``main``.
        is_fresh: ask the Hub even for a tag that the cache knows.

    Raises:
        ConfigError: there is no such dataset or revision, or no permission to read it.
        DownloadError: the Hub does not answer; or ``HF_HUB_OFFLINE`` is set and the cache does not know the revision.
    """
    name = parse_name(root, revision)
    if is_commit(name.revision):
        return _source(name, name.revision, name.revision)
    try:
        return _resolve_offline(name) if is_offline() else _resolve_known(name, client, is_fresh=is_fresh)
    except (ConfigError, DownloadError) as error:
        if "://" in root:
            raise
        # A mistyped path looks like the name of a dataset.
        raise type(error)(
            f"no such folder: {os.path.abspath(root)!r}. As a dataset of the Hugging Face Hub: {error}"
        ) from error


def _resolve_known(name: HubName, client: Client | None, *, is_fresh: bool) -> HubSource:
    """Return the commit of a format tag from the cache, or else from the Hub."""
    wanted = name.revision or FORMAT_TAGS[0]
    if wanted in FORMAT_TAGS and not is_fresh:
        commit = read_ref(name.repo_id, wanted)
        if commit:
            pinned = _source(name, wanted, commit)
            if read_listing(cache_place(pinned).listing) is not None:
                return pinned
    return _resolve_online(name, client or Client())


def _resolve_online(name: HubName, client: Client) -> HubSource:
    chosen = name.revision
    if not chosen:
        refs = client.read_json(f"{name.repo_id}/refs", HubRequest(repo_id=name.repo_id))
        tags = ref_names(refs, "tags")
        chosen = next((tag for tag in FORMAT_TAGS if tag in tags), _MAIN)
    ask = HubRequest(repo_id=name.repo_id, revision=chosen)
    # Not the target of the ref: an annotated tag points to a tag object, and the cache keeps files by commit.
    told: Any = client.read_json(f"{name.repo_id}/revision/{quote_name(chosen)}", ask)
    commit = str(told.get("sha", "")) if isinstance(told, dict) else ""
    if not is_commit(commit):
        raise DownloadError(f"the Hub tells no commit of {ask}, but {commit!r}. Check HF_ENDPOINT.")
    write_ref(name.repo_id, chosen, commit)
    return _source(name, chosen, commit)


def _resolve_offline(name: HubName) -> HubSource:
    wanted = (name.revision,) if name.revision else (*FORMAT_TAGS, _MAIN)
    for revision in wanted:
        commit = read_ref(name.repo_id, revision)
        if commit:
            return _source(name, revision, commit)
    raise DownloadError(
        f"HF_HUB_OFFLINE is set, and the cache does not know revision {name.revision or ' or '.join(wanted)!r} of "
        f"{name.repo_id!r}{suggest(name.revision, list_refs(name.repo_id))} With network: HF_HUB_OFFLINE=0 "
        f"{download_command(name.repo_id, name.revision)}"
    )


def _source(name: HubName, revision: str, commit: str) -> HubSource:
    return HubSource(repo_id=name.repo_id, revision=revision, commit=commit, folder=name.folder)
