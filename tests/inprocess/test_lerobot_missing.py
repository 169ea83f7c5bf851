import sys

import pytest

import raypipe as rp
from raypipe.lerobot.trainer import run_lerobot_train


def test_without_lerobot_the_bridge_says_what_to_install(tiny_dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot.datasets.dataset_metadata", None)

    with pytest.raises(rp.ConfigError, match=r"pip install --editable '.*\[lerobot\]'"):
        rp.lerobot.metadata(rp.open_dataset(str(tiny_dataset)))


def test_without_lerobot_its_trainer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot.scripts.lerobot_train", None)
    monkeypatch.setitem(sys.modules, "lerobot.scripts", None)

    with pytest.raises(rp.ConfigError, match=r"pip install --editable '.*\[lerobot\]'"):
        run_lerobot_train(["--help"])
