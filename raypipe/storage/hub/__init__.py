"""Datasets on the Hub: pinned to a commit, found in the cache of huggingface_hub, fetched whole or read by range.

The modules, from the bottom up (each may use those above it)::

    client.py  requests within the budget; what happens on 429 and 503                    Client
    cache.py   names, their commits, and where the Hub's cache has a commit               HubSource, resolve
    files.py   what `raypipe download` puts in place, and what a run reads; all verified  fetch_files, HubFiles

huggingface_hub reads the variables ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``. Nothing here
knows what a LeRobot dataset is.
"""
