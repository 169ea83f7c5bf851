"""Figures that tell the truth: whichever stage is slow is the one that the training loop is said to wait for."""

import pickle
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from batches import TOP, local_loader

from raypipe.dataset import open_dataset
from raypipe.decode import FrameDecoder
from raypipe.feed.blocks import HEADER
from raypipe.feed.local import LocalFeed
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

PAUSE_S = 0.05


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    spec = SynthSpec(lengths=(6,) * 20, cameras=(CameraSpec(name=TOP, height=32, width=32),))
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("waits") / "dataset", spec)))


def slow_read(monkeypatch):
    blocks = LocalFeed.blocks

    def read(self):
        for table in blocks(self):
            time.sleep(PAUSE_S)
            yield with_finish(table, time.time())

    monkeypatch.setattr(LocalFeed, "blocks", read)


def slow_transport(monkeypatch):
    blocks = LocalFeed.blocks

    def send(self):
        for table in blocks(self):
            done = with_finish(table, time.time())
            time.sleep(PAUSE_S)
            yield done

    monkeypatch.setattr(LocalFeed, "blocks", send)


def with_finish(table, at):
    """Return a block whose task was done at a given time."""
    headers = [one and pickle.dumps(replace(pickle.loads(one), finished_at=at)) for one in table[HEADER].to_pylist()]
    return table.set_column(table.column_names.index(HEADER), HEADER, pa.array(headers, pa.large_binary()))


def slow_decode(monkeypatch):
    decode = FrameDecoder.read_clip

    def work(self, *arguments, **options):
        time.sleep(PAUSE_S)
        return decode(self, *arguments, **options)

    monkeypatch.setattr(FrameDecoder, "read_clip", work)


def slow_transform(batch, _):
    time.sleep(4 * PAUSE_S)
    return batch


SLOW = {"read": slow_read, "transport": slow_transport, "decode": slow_decode, "assembly": lambda _: None}


@pytest.mark.parametrize("stage", SLOW)
def test_the_stage_that_is_slow_is_the_one_that_is_waited_for(dataset, monkeypatch, stage):
    SLOW[stage](monkeypatch)
    pipe = Pipeline(dataset, batch_size=6, seed=0, order={"live_spans": 6, "clip_frames": 2})
    settings = {"transform": slow_transform} if stage == "assembly" else {}
    loader = local_loader(pipe, **settings)

    assert len(list(loader)) == 20

    stats = loader.stats()
    waits = (stats.read_wait_s, stats.decode_wait_s, stats.transport_wait_s, stats.assembly_wait_s)
    assert stats.waits_for == stage
    assert sum(waits) == pytest.approx(stats.wait_s)
    assert max(waits) > 0.6 * stats.wait_s


def test_a_loop_that_is_slower_than_the_loader_waits_for_nothing_but_the_start(dataset):
    pipe = Pipeline(dataset, batch_size=6, seed=0, order={"live_spans": 6})
    loader = local_loader(pipe)

    waited = []
    for _ in loader:
        time.sleep(PAUSE_S)
        waited.append(loader.stats().wait_s)

    assert np.diff(waited).sum() < 0.5 * loader.stats().step_s
