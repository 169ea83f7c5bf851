"""What a small file claims is bounded before memory is taken, by what its container or a stated limit allows."""

import json
import struct
import threading
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av
import pyarrow as pa
import pytest
from batches import TOP
from bounds_proofs import read_claim, repeated, write_dataset_of, write_mp4, write_table
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.errors import DecodeError
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

MOST_MB = 700
"""What may be taken beside the libraries: `raypipe.text.limits.FREE_BYTES`, and a copy of some of it."""

READ_META = "from raypipe.format import read_metadata; read_metadata(place)"


def assert_refused(found, error, *texts):
    assert found.error == error, found
    assert all(text in found.text for text in texts), found.text
    assert found.peak_mb < MOST_MB, found


def assert_read(found):
    assert not found.error, found
    assert found.peak_mb < MOST_MB, found


READERS = {
    "index": "from raypipe.format import read_video_index; from raypipe.storage import Storage; "
    "read_video_index(Storage(place), 'a.mp4')",
    "container": "from raypipe.validate.video import *; read_container(Storage(place), 'a.mp4')",
    "track": "from raypipe.reshard.mp4 import read_track; from raypipe.storage import Storage; "
    "read_track(Storage(place), 'a.mp4')",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "claim",
    [
        {"count": 60_000_000},
        {"count": 4_000_000_000, "size": 1},
        {"count": 10, "size": 1, "run": 60_000_000},
        {"count": 10, "size": 1, "per_chunk": 400_000_000},
    ],
    ids=lambda claim: "-".join(f"{key}{value}" for key, value in claim.items()),
)
def test_an_mp4_claims_no_more_frames_than_it_has_bytes_for(reader, claim, tmp_path):
    write_mp4(tmp_path / "a.mp4", **claim)

    found = read_claim(READERS[reader], tmp_path)

    if reader == "index" and "per_chunk" in claim:
        # Where the packets lie is not needed to decode them.
        assert_read(found)
    else:
        assert_refused(found, "DatasetError", "a.mp4" if reader != "container" else "index")


@pytest.mark.parametrize("reader", READERS)
def test_a_box_claims_no_more_bytes_than_its_file_has(reader, tmp_path):
    (tmp_path / "a.mp4").write_bytes(struct.pack(">I4sQ", 1, b"moov", 1 << 36) + bytes(3000))

    assert_refused(read_claim(READERS[reader], tmp_path), "DatasetError", "68719476736")


def test_texts_of_tasks_are_not_written_out_beyond_a_bound(tmp_path):
    root = write_dataset_of(tmp_path / "d", tasks=1_000_000)
    texts = repeated("do" * 50_000, pa.string(), 1_000_000)
    write_table(root, "meta/tasks.parquet", {"task_index": pa.array(range(1_000_000)), "task": texts})

    assert_refused(read_claim(READ_META, root), "DatasetError", "tasks.parquet", "bytes")


def test_rows_of_an_episode_table_are_bounded(tmp_path):
    root = write_dataset_of(tmp_path / "d")
    names = ("episode_index", "length", "data/chunk_index", "data/file_index")
    columns = {name: repeated(1, pa.int64(), 20_000_000) for name in names}
    write_table(root, "meta/episodes/chunk-000/file-000.parquet", columns)

    assert_refused(read_claim(READ_META, root), "DatasetError", "file-000.parquet", "bytes")


def test_texts_within_lists_of_an_episode_table_are_bounded(tmp_path):
    root = write_dataset_of(tmp_path / "d")
    lists = pa.ListArray.from_arrays(pa.array([0, 100_000], pa.int32()), repeated("d" * 100_000, pa.string(), 100_000))
    columns = {"episode_index": [0], "length": [3], "data/chunk_index": [0], "data/file_index": [0], "tasks": lists}
    write_table(root, "meta/episodes/chunk-000/file-000.parquet", columns)

    assert_refused(read_claim(READ_META, root), "DatasetError", "file-000.parquet", "bytes")


READ_ROWS = (
    "from raypipe.format import DatasetMeta, RowReader; from raypipe.format import read_metadata; "
    "RowReader(read_metadata(place), ['the.action', 'note']).read_episode(0)"
)


@pytest.mark.parametrize("kind", ["numbers", "texts", "lists"])
def test_rows_of_a_data_file_are_bounded(kind, tmp_path):
    features = {"the.action": {"dtype": "float32", "shape": [2]}, "note": {"dtype": "string", "shape": [1]}}
    root = write_dataset_of(tmp_path / "d", features=features)
    rows = {"numbers": 40_000_000, "texts": 100_000, "lists": 3}[kind]
    note, action = pa.repeat("a", rows), pa.repeat(0.5, rows)
    if kind == "texts":
        note = repeated("d" * 100_000, pa.string(), rows)
    if kind == "lists":
        action = pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 80_000_000], pa.int32()), repeated(0.5, pa.float64(), 80_000_000)
        )
    if kind == "numbers":
        note, action = repeated("a", pa.string(), rows), repeated(0.5, pa.float64(), rows)
    write_table(root, "data/chunk-000/file-000.parquet", {"the.action": action, "note": note})

    assert_refused(read_claim(READ_ROWS, root), "DatasetError", "file-000.parquet", "bytes")


@pytest.mark.parametrize("kind", ["deep", "number", "keys"])
def test_json_of_a_dataset_is_bounded(kind, tmp_path):
    root = write_dataset_of(tmp_path / "d")
    texts = {"deep": "[" * 200_000, "number": '{"fps": ' + "1" * 5000 + "}", "keys": "[" + "[]," * 9_000_000 + "[]]"}
    (root / "meta/info.json").write_text(texts[kind])

    assert_refused(read_claim(READ_META, root), "DatasetError", "info.json")


def test_fields_of_json_lines_that_nobody_asks_for_take_no_memory(tmp_path):
    root = write_dataset_of(tmp_path / "d", episodes=8000, codebase_version="v2.1")
    lines = [{"episode_index": i, "length": 1, "tasks": ["do"], f"extra{i}": 1} for i in range(8000)]
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))

    found = read_claim(READ_META, root)

    assert_read(found)


def test_a_line_of_statistics_is_bounded(tmp_path):
    root = write_dataset_of(tmp_path / "d", codebase_version="v2.1")
    with open(root / "meta/episodes_stats.jsonl", "wb") as file:
        file.truncate(3 << 30)

    read_stats = (
        "from raypipe.format import read_stats; from raypipe.storage import Storage; read_stats(Storage(place))"
    )
    assert_refused(read_claim(read_stats, root), "DatasetError", "episodes_stats.jsonl")


@pytest.mark.parametrize("claim", [{"fps": 1e-300}, {"chunks_size": 10**30}, {"total_episodes": 10**30}])
def test_numbers_of_info_json_are_bounded(claim, tmp_path):
    root = write_dataset_of(tmp_path / "d", **{"codebase_version": "v2.1", **claim})
    (root / "meta/episodes.jsonl").write_text('{"episode_index": 0, "length": 3, "tasks": ["do"]}\n')

    assert_refused(read_claim(READ_META, root), "DatasetError", "info.json", *claim)


@pytest.mark.parametrize(
    "feature",
    [
        {"dtype": "float32", "shape": [10**9]},
        {"dtype": "float32", "shape": [10**9] * 5},
        {"dtype": "float32", "shape": [-1]},
        {"dtype": "image", "shape": [3, 100_000, 100_000]},
        {"dtype": "video", "shape": [3, 4, 4], "info": {"video.height": 10**6, "video.width": 10**6}},
    ],
)
def test_shapes_of_features_are_bounded(feature, tmp_path):
    root = write_dataset_of(tmp_path / "d", features={"odd": feature})

    assert_refused(read_claim(READ_META, root), "DatasetError", "info.json", "'odd'", "shape")


def _aliases(depth):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth)]
    return "\n".join([*lines, f"datasets: *a{depth - 1}"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aliases.yaml", _aliases(9)),
        ("itself.yaml", "datasets: &a [*a, *a]"),
        ("deep.yaml", "datasets: " + "[" * 20_000),
        ("number.yaml", "datasets: [a]\ntemperature: " + "1" * 5000),
        ("date.yaml", "datasets: [a]\ntemperature: 2024-99-99"),
        ("deep.toml", "datasets = " + "[" * 20_000),
        ("number.toml", "datasets = ['a']\ntemperature = " + "1" * 5000),
    ],
    ids=lambda value: value if value.endswith(("yaml", "toml")) else "",
)
def test_a_mixture_file_is_bounded(name, text, tmp_path):
    (tmp_path / name).write_text(text)

    code = "from raypipe.mixture import read_mixture_file; read_mixture_file(place)"
    assert_refused(read_claim(code, tmp_path / name), "ConfigError", name)


def test_an_alias_in_a_mixture_file_is_what_it_names(tmp_path):
    path = tmp_path / "mixture.yaml"
    path.write_text("datasets:\n  a: {root: /a, selection: &all {min_frames: 3}}\n  b: {root: /b, selection: *all}\n")

    found = read_claim(
        "from raypipe.mixture import read_mixture_file; "
        "assert len({member.selection for member in read_mixture_file(place).members}) == 1",
        path,
    )

    assert found.error == "", found


@pytest.mark.parametrize("claim", ["order", "legs"])
def test_lanes_of_a_state_are_bounded(claim, tmp_path):
    lanes = 2_000_000_000
    order = {"shuffle": True, "live_spans": 1, "span_frames": "episode", "tail": "short", "selection": ""}
    legs = [{"lanes": lanes if claim == "legs" else 4, "live_spans": 1, "frames_per_lane": 1}]
    state = {"fingerprint": "f", "seed": 0, "epoch": 0, "order": {**order, "lanes": 4}, "legs": legs}
    if claim == "order":
        state["order"]["lanes"] = lanes
    (tmp_path / "state.json").write_text(json.dumps(state))

    code = (
        "import json; from raypipe.plan import ORDER_VERSION, OrderState\n"
        "import numpy as np\n"
        "state = OrderState.from_dict({**json.load(open(place)), 'order_version': ORDER_VERSION})\n"
        "[np.full(one, 1) for one in (state.spec.lanes, *(leg.lanes for leg in state.legs))]"
    )
    assert_refused(read_claim(code, tmp_path / "state.json"), "ResumeError", "at most")


def test_rows_of_an_account_are_bounded(tmp_path):
    times = repeated(1, pa.int64(), 80_000_000)
    path = write_table(tmp_path, "account.parquet", {"times": times})

    code = "from raypipe.account.file import read_account; read_account(place)"
    assert_refused(read_claim(code, path), "DatasetError", "account.parquet", "bytes")


class _Endless(BaseHTTPRequestHandler):
    """Sends zeros for as long as they are taken, without a length; below ``/packed`` as gzip, below ``/odd`` as br."""

    def do_HEAD(self):
        self._begin()

    def do_GET(self):
        if not any(word in self.path for word in ("plain", "packed", "odd", "a.mp4")):
            # huggingface_hub asks for a list of its own first.
            self.send_error(404)
            return
        self._begin()
        pack = zlib.compressobj(wbits=31) if "packed" in self.path else None
        piece = bytes(1 << 20)
        with suppress(OSError):
            for _ in range(3 << 10):
                self.wfile.write(pack.compress(piece) if pack else piece)

    def _begin(self):
        code = "gzip" if "packed" in self.path else "br" if "odd" in self.path else "identity"
        self.send_response(200)
        self.send_header("Content-Encoding", code)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def endless():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("kind", ["plain", "packed", "odd"])
def test_an_answer_of_the_hub_is_bounded(kind, endless, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", endless)

    code = (
        "from raypipe.storage import Client; from raypipe.storage.hub.client import HubRequest; "
        "Client().read_json(place, HubRequest(repo_id='a/b'))"
    )
    found = read_claim(code, kind)

    assert_refused(found, "DownloadError", endless, "'br'" if kind == "odd" else "268,435,456 bytes")


def test_a_file_of_a_web_server_is_bounded(endless):
    code = "from raypipe.storage import open_storage; open_storage(place).read_bytes('info.json')"

    assert_refused(read_claim(code, f"{endless}/plain"), "DownloadError", "info.json", "268,435,456 bytes")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A dataset of one small camera, whose video has large frames."""
    camera = CameraSpec(name=TOP, height=64, width=64)
    root = write_dataset(tmp_path_factory.mktemp("large") / "arm", SynthSpec(lengths=(3,), cameras=(camera,)))
    with av.open(str(root / f"videos/{TOP}/chunk-000/file-000.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = 4096, 3072, "yuv420p"
        for number in range(3):
            picture = av.VideoFrame(3072, 4096, "yuv420p")
            picture.pts = number
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    return root


def test_a_video_of_larger_frames_than_info_declares_is_refused_before_one_is_made(large, monkeypatch):
    for name in ("get_frames_in_range", "get_frames_at"):
        monkeypatch.setattr(VideoDecoder, name, lambda *_, **__: pytest.fail("a frame is made"))

    sizes = r"frames of \(4096, 3072, 3\), and info\.json declares \(64, 64, 3\)"
    with pytest.raises(DecodeError, match=sizes), Pipeline(str(large), batch_size=2, seed=0).loader() as loader:
        next(iter(loader))


def test_a_video_of_larger_frames_than_any_camera_is_refused(large, monkeypatch):
    monkeypatch.setattr("raypipe.decode.videos.MOST_PIXELS", 4096 * 3072 - 1)

    with pytest.raises(DecodeError, match=r"file-000\.mp4' claims frames of 3072x4096, .* may have 12,582,911 pixels"):
        open_dataset(str(large)).sample_of(0, 0)


def test_a_part_of_a_file_of_a_web_server_is_bounded(endless):
    code = "from raypipe.storage import open_storage; open_storage(place).read_range('a.mp4', 5, 9)"

    assert_refused(read_claim(code, endless), "DownloadError", "more than the 4 bytes")
