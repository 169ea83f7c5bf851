import subprocess
import sys

import pytest
import torch
import torchcodec.encoders
from torchcodec.decoders import VideoDecoder

from raypipe.decode import VideoCoding, open_writer, videos
from raypipe.errors import ConfigError
from raypipe.testing import Stamp, SynthSpec, has_encoder, read_stamp, write_dataset

CODING = VideoCoding(height=32, width=32, fps=10, encoder="libx264", crf=20, preset="veryfast", options={"g": 2})
FRAMES = torch.zeros((2, 3, 32, 32), dtype=torch.uint8)


@pytest.fixture
def _old_torchcodec(monkeypatch):
    """That of an environment with LeRobot 0.6: it takes all frames of a video at once."""
    monkeypatch.delattr(torchcodec.encoders, "Encoder", raising=False)


@pytest.mark.usefixtures("_old_torchcodec")
def test_an_older_torchcodec_writes_the_same_frames(tmp_path):
    spec = SynthSpec(lengths=(7, 9))

    root = write_dataset(tmp_path / "out", spec)

    video = VideoDecoder(root / f"videos/{spec.cameras[0].name}/chunk-000/file-000.mp4")
    expected = [Stamp(episode, frame, 0) for episode, length in enumerate(spec.lengths) for frame in range(length)]
    assert [read_stamp(frame) for frame in video] == expected


@pytest.mark.usefixtures("_old_torchcodec")
def test_an_older_torchcodec_says_which_one_writes_long_videos(tmp_path, monkeypatch):
    monkeypatch.setattr(videos, "MOST_HELD_BYTES", FRAMES.nbytes)

    with open_writer(tmp_path / "long.mp4", CODING) as sink:
        sink.add_frames(FRAMES)
        with pytest.raises(ConfigError, match=r"long\.mp4.*pip install 'torchcodec>=0\.13'"):
            sink.add_frames(FRAMES)


WRITE_AV1 = """
import sys
from pathlib import Path
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
camera = CameraSpec(name="observation.images.top", codec="av1", gop=4)
for number in range(4):
    write_dataset(Path(sys.argv[1], str(number)), SynthSpec(version="v2.1", lengths=(3,) * 24, cameras=(camera,)))
"""


def test_threads_that_write_av1_do_not_crash_the_encoder(tmp_path):
    if not has_encoder("av1"):
        pytest.skip("this FFmpeg has no encoder for AV1")

    command = [sys.executable, "-c", WRITE_AV1, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr[-2000:]
