"""The chain of digests through an account: what was written is what is read, and nothing before it is gone.

::

    origin      digest of dataset and seed
    part 0      before = origin
    part 1      before = digest of (origin, part 0)
    part 2      before = digest of (part 1's before, part 1)
    header      head   = digest of (part 2's before, part 2, the header)

A rank seals its account when it takes it; a checkpoint has the head of rank 0's beside the state. A part that is
changed, moved, left out or put in breaks the chain from there on, and so does a changed header. There is no secret in
it: who rewrites a whole chain is found by the plan, as far as the plan can tell.

Accounts that were written before there was a chain have none, and are read as they are.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raypipe.account.parts import Account, Header, Part


def seal_account(header: Header, parts: Sequence[Part]) -> Account:
    """Return the account of these parts, with the chain through them."""
    *befores, end = _chain(header, parts)
    chained = tuple(replace(part, before=before) for part, before in zip(parts, befores, strict=True))
    return Account(header=replace(header, head=_digest(end, _header_fields(header))), parts=chained)


def find_break(account: Account) -> str:
    """Return where an account is not what was sealed, in words; empty if it is, or if it never had a chain."""
    *befores, end = _chain(account.header, account.parts)
    has_chain = account.header.head or any(part.before for part in account.parts)
    for part, before in zip(account.parts, befores, strict=True):
        if has_chain and part.before != before:
            return f"what comes before {part.describe()} is not what was recorded before it"
    if has_chain and account.header.head != _digest(end, _header_fields(account.header)):
        return "its header or its last part is not what was recorded"
    return ""


def _chain(header: Header, parts: Sequence[Part]) -> Iterator[str]:
    """Yield what every part has before it, and at last what comes after all."""
    before = _digest("", [header.state.get("fingerprint"), header.state.get("seed"), header.name])
    for part in parts:
        yield before
        before = _digest(before, part.digest)
    yield before


def _header_fields(header: Header) -> list[Any]:
    return [header.root, header.selection, header.state, header.name, list(header.members)]


def _digest(before: str, content: Any) -> str:
    return hashlib.blake2b(json.dumps([before, content], sort_keys=True).encode(), digest_size=16).hexdigest()
