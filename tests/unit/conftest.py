"""Unit tests run without Ray, without a network and without waiting: each of them raises here."""

import socket
import sys
import time

import pytest


@pytest.fixture(autouse=True)
def _no_outside_world(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("unit tests use neither Ray, nor a network, nor sleep")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(time, "sleep", forbidden)
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", forbidden)
