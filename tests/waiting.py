"""Waiting for what must come: it ends as soon as it has, and fails long after it should have."""

import time

PATIENCE_S = 90.0
"""How long anything may take that must happen. Nothing here waits that long unless it hangs."""


def wait_until(is_so, what: str = "it has come to that", timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
