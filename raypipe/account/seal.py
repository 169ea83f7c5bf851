"""Chain digests through an account, so that a reader detects changed or missing parts.

::

    origin      digest of dataset and seed
    part 0      before = origin
    part 1      before = digest of (origin, part 0)
    part 2      before = digest of (part 1's before, part 1)
    header      head   = digest of (part 2's before, part 2, the header)

A rank seals its account when it takes it. A checkpoint has the head of rank 0's account beside the state. Changing,
moving, removing or inserting a part breaks the chain from there on, and so does changing the header. The chain has no
secret: if someone rewrites all of it, only the check against the plan can find out, as far as the plan can tell.

Accounts from before the chain existed have none; they are read without this check.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raypipe.account.parts import Account, Header, Part


def seal_account(header: Header, parts: Sequence[Part]) -> Account:
    """Return the account of these parts with their digest chain."""
    *befores, end = _chain(header, parts)
    chained = tuple(replace(part, before=before) for part, before in zip(parts, befores, strict=True))
    return Account(header=replace(header, head=_digest(end, _header_fields(header))), parts=chained)


def find_break(account: Account) -> str:
    """Return in words where an account differs from its seal; empty if nowhere, or if it never had a chain."""
    *befores, end = _chain(account.header, account.parts)
    has_chain = account.header.head or any(part.before for part in account.parts)
    for part, before in zip(account.parts, befores, strict=True):
        if has_chain and part.before != before:
            return f"what comes before {part.describe()} is not what was recorded before it"
    if has_chain and account.header.head != _digest(end, _header_fields(account.header)):
        return "its header or its last part is not what was recorded"
    return ""


def _chain(header: Header, parts: Sequence[Part]) -> Iterator[str]:
    """Yield the digest before every part, and last the head."""
    before = _digest("", [header.state.get("fingerprint"), header.state.get("seed"), header.name])
    for part in parts:
        yield before
        before = _digest(before, part.digest)
    yield before


def _header_fields(header: Header) -> list[Any]:
    return [header.root, header.selection, header.state, header.name, list(header.members)]


def _digest(before: str, content: Any) -> str:
    return hashlib.blake2b(json.dumps([before, content], sort_keys=True).encode(), digest_size=16).hexdigest()
