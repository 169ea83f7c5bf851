"""The whole rank in one process: real threads, real files, no Ray."""

import sys

import pytest
from batches import rows as rows
from batches import varied as varied


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("these tests run without Ray")

    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", forbidden)
