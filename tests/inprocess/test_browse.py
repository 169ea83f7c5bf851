"""``raypipe show --serve``, by plain HTTP: what the page is given, and who is given nothing."""

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from damages import edit_info
from depth_cases import DEPTH, wall_of, write_deepening
from PIL import Image
from program import run_program

import raypipe as rp
from raypipe.errors import DatasetError
from raypipe.testing import CameraSpec, SynthSpec, read_stamp, write_dataset
from raypipe.views import site as site_module
from raypipe.views.choose import make_server
from raypipe.views.site import Checks, Site

PAGE = files("raypipe.views").joinpath("page")


@contextmanager
def served(root):
    """Give a function that asks the server of a dataset."""
    server = make_server(Site(rp.open_dataset(str(root))), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def ask(path, method="GET", **headers):
        port = urlsplit(f"//{headers.get('Host', f'127.0.0.1:{server.server_port}')}").port or 80
        headers = {"Cookie": f"raypipe-{port}={server.token}", **headers}
        connection = http.client.HTTPConnection(*server.server_address, timeout=60)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, text in headers.items():
            connection.putheader(name, text)
        connection.endheaders()
        answer = connection.getresponse()
        answer.content = answer.read()
        connection.close()
        return answer

    ask.address, ask.link, ask.token = server.server_address, server.url, server.token
    try:
        yield ask
    finally:
        server.shutdown()
        server.close()
        thread.join()


@pytest.fixture(scope="module")
def ask(tiny_dataset):
    with served(tiny_dataset) as asker:
        yield asker


def ask_json(ask, path, status=200):
    answer = ask(path)
    assert answer.status == status, answer.content
    return json.loads(answer.content)


def test_the_page_and_all_its_files_are_served_and_come_with_the_package(ask):
    page = ask("/").content.decode()
    needed = set(re.findall(r'(?:href|src)="/([\w.]+)"', page))
    for name in [one for one in needed if one.endswith(".js")]:
        needed |= set(re.findall(r'from "/([\w.]+)"', ask(f"/{name}").content.decode()))

    assert {one.name for one in PAGE.iterdir()} == {"index.html", *needed}
    assert all(ask(f"/{name}").status == 200 for name in needed)
    project = tomllib.loads((Path(rp.__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["raypipe.views"] == ["page/*"]


def test_the_server_listens_on_loopback_alone(ask):
    assert ask.address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", ""])
@pytest.mark.parametrize("path", ["/", "/api/about", "/video?episode=0&camera=0"])
def test_a_name_that_leads_here_by_dns_rebinding_is_refused(ask, host, path):
    answer = ask(path, Host=host)

    assert answer.status == 403
    assert b"pick up" not in answer.content


PATHS = ("/", "/index.html", "/browse.js", "/api/about", "/api/findings?start", "/frame?episode=0&camera=0&frame=0")


@pytest.mark.parametrize("path", [*PATHS, "/video?episode=0&camera=0", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_does_not_have_the_link_is_given_nothing(ask, path, method):
    answer = ask(path, method, Cookie="")

    assert answer.status == 403
    assert "Set-Cookie" not in answer.headers
    assert (
        answer.content == b"" if method == "HEAD" else b"the link that raypipe show --serve printed" in answer.content
    )


def test_who_does_not_have_the_link_starts_no_check(tiny_dataset, monkeypatch):
    started = []
    monkeypatch.setattr(site_module, "_start", started.append)

    with served(tiny_dataset) as ask:
        assert ask("/api/findings?start", Cookie="").status == 403

    assert started == []


@pytest.mark.parametrize("change", ["", "x", "short", "long", "other case", "\u00e9", "none"])
def test_another_token_is_none(ask, change):
    other = {"short": ask.token[:-1], "long": f"{ask.token}A", "other case": ask.token.swapcase(), "none": "None"}
    wrong = other.get(change, change)
    name = f"raypipe-{ask.address[1]}"

    assert ask("/api/about", Cookie=f"{name}={wrong}".encode()).status == 403
    assert ask(f"/?token={quote(wrong)}", Cookie="").status == 403


def test_the_link_gives_the_page_and_a_cookie_that_no_script_and_no_other_site_has(ask):
    link = urlsplit(ask.link)
    page = ask(f"{link.path}?{link.query}", Cookie="", Host="localhost:9000", **{"Sec-Fetch-Site": "cross-site"})
    cookie, *marks = page.headers["Set-Cookie"].split("; ")

    assert (page.status, link.port) == (200, ask.address[1])
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} == set(marks)
    # Cookies are those of all ports of a machine: a tunnel to another one has its own.
    assert cookie == f"raypipe-9000={ask.token}"
    assert ask("/api/about", Cookie=cookie, Host="localhost:9000").status == 200
    assert ask("/api/about", Cookie=cookie).status == 403, "of another port"


def test_cookies_of_other_programs_of_this_machine_disturb_nothing(ask):
    mine = f"raypipe-{ask.address[1]}={ask.token}"

    assert ask("/", Cookie=f'theme={{"a": "b"}}; x; =; {mine}; raypipe-1=other').status == 200


def test_every_server_has_its_own_token(ask, tiny_dataset):
    with served(tiny_dataset) as other:
        assert ask.token != other.token
    assert len(ask.token) >= 32


def test_another_site_can_set_nothing_off(ask):
    foreign = {"Sec-Fetch-Site": "cross-site"}

    assert ask("/api/findings?start", **foreign).status == ask("/frame?episode=0&camera=0", **foreign).status == 403
    assert ask("/api/about", **{"Sec-Fetch-Site": "same-origin"}).status == 200


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(ask, host):
    assert ask("/api/about", Host=host).status == 200


def test_other_sites_can_neither_read_nor_embed_what_is_served(ask):
    for path in ("/", "/api/episodes", "/frame?episode=0&camera=0&frame=0", "/video?episode=0&camera=0"):
        headers = ask(path).headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/choose.py",
        "/page/index.html",
        "/meta/info.json",
        "/video?episode=../../etc/passwd&camera=0",
        "/video?episode=0&camera=observation.images.top",
        "/video?episode=0&camera=9",
        "/video?episode=99&camera=0",
        "/frame?episode=0&camera=0&frame=-1",
        "/frame?episode=0&camera=0&frame=7",
        "/frame?episode=0&camera=0&frame=0&size=huge",
        "/frame?episode=0&camera=0&frame=99999999999999999999999",
        "/api/episode?episode=%D9%A3",
        "/api/batch?step=1&batch_size=0",
        "/api/batch?step=99999",
    ],
)
def test_addresses_that_name_nothing_are_errors_that_say_so(ask, path):
    answer = ask(path)

    assert answer.status in (400, 404)
    assert json.loads(answer.content)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed_through_the_server(ask, method):
    assert ask("/api/about", method).status == 501


def test_a_dataset_whose_videos_lie_elsewhere_gives_none_of_them(tmp_path):
    root = write_dataset(tmp_path / "in" / "dataset", SynthSpec())
    outside = tmp_path / "in" / "secret.mp4"
    outside.write_bytes(next(root.glob("videos/*top*/*/*.mp4")).read_bytes())
    edit_info(root, lambda info: info.update(video_path="../secret.mp4"))

    with pytest.raises(DatasetError, match=r"'\.\./secret\.mp4', which leads out of the dataset"), served(root):
        pass


def test_a_file_that_is_no_video_is_not_served(tmp_path):
    root = write_dataset(tmp_path / "dataset", SynthSpec())
    edit_info(root, lambda info: info.update(video_path="meta/info.json"))

    with served(root) as ask:
        answer = ask("/video?episode=0&camera=0")

    assert answer.status == 422
    assert b"codebase_version" not in answer.content


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-99", slice(0, 100)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-50", slice(-50, None)),
        ("bytes=10-10", slice(10, 11)),
        ("bytes=5-99999999", slice(5, None)),
    ],
)
def test_a_range_of_a_video_is_those_bytes_of_the_file(ask, tiny_dataset, asked, part):
    whole = (tiny_dataset / "videos/observation.images.top/chunk-000/file-000.mp4").read_bytes()

    answer = ask("/video?episode=1&camera=0", Range=asked)

    assert answer.status == 206
    assert answer.content == whole[part]
    start, stop, _ = part.indices(len(whole))
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(whole)}"


@pytest.mark.parametrize("asked", ["", "bytes=0-1,4-5", "bytes=9-3", "bytes=-", "lines=1-2", "bytes=a-b"])
def test_a_range_that_is_none_gives_the_whole_video(ask, tiny_dataset, asked):
    whole = (tiny_dataset / "videos/observation.images.top/chunk-000/file-000.mp4").read_bytes()

    answer = ask("/video?episode=1&camera=0", Range=asked)

    assert answer.status == 200
    assert answer.content == whole


def test_a_range_behind_the_end_is_an_error_and_head_sends_no_body(ask):
    assert ask("/video?episode=0&camera=0", Range="bytes=99999999-").status == 416
    head = ask("/video?episode=0&camera=0", "HEAD")
    assert head.status == 200
    assert head.content == b""
    assert int(head.headers["Content-Length"]) > 1000


def test_an_episode_has_the_numbers_tasks_and_times_of_its_frames(ask, tiny_dataset):
    dataset = rp.open_dataset(str(tiny_dataset))

    told = ask_json(ask, "/api/episode?episode=2")

    assert told["length"] == 12
    # Episodes of 7 and 1 frames lie before it in the file, at 10 fps.
    assert [camera["start_s"] for camera in told["cameras"]] == pytest.approx([0.8, 0.8])
    assert told["tasks"] == [{"text": "pick up the cube", "start": 0, "stop": 12}]
    samples = [dataset.sample_of(2, frame) for frame in range(12)]
    for curves in told["curves"]:
        expected = np.stack([sample[curves["feature"]].numpy() for sample in samples])
        np.testing.assert_allclose(np.array(curves["values"]).T, expected, rtol=1e-5)
    assert {one["feature"] for one in told["curves"]} >= {"action", "observation.state"}


def test_episodes_come_with_lengths_and_tasks(ask):
    listed = ask_json(ask, "/api/episodes")

    assert listed["episode"] == [0, 1, 2, 3, 4]
    assert listed["length"] == [7, 1, 12, 5, 9]
    assert [listed["texts"][places[0]] for places in listed["tasks"][:2]] == ["pick up the cube", "open the drawer"]


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_still_is_the_frame_that_is_asked_for(kind, size, tmp_path):
    cameras = (CameraSpec(name="observation.images.top", kind=kind),)
    root = write_dataset(tmp_path / "dataset", SynthSpec(cameras=cameras, lengths=(5, 40)))

    with served(root) as ask:
        # Beside each other, and back: those that were decoded together and those that were not.
        for frame in (0, 15, 16, 39, 1):
            answer = ask(f"/frame?episode=1&camera=0&frame={frame}&size={size}")
            assert answer.headers["Content-Type"] == "image/jpeg"
            stamp = read_stamp(np.array(Image.open(io.BytesIO(answer.content))))
            assert (stamp.episode, stamp.frame) == (1, frame)
        is_played = ask_json(ask, "/api/episode?episode=1")["cameras"][0]["start_s"] is not None
    assert is_played == (kind == "video")


def test_a_batch_on_the_page_is_the_one_that_the_pipeline_gives(ask, tiny_dataset):
    pipe = rp.Pipeline(rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=7)
    for step in (0, 3):
        batch = pipe.batch_at(step, rank=1, world_size=2, epoch=1)

        told = ask_json(ask, f"/api/batch?step={step}&batch_size=4&seed=7&epoch=1&rank=1&world_size=2")

        assert told["num_steps"] == pipe.plan(epoch=1, world_size=2).num_steps
        assert told["episode"] == batch["episode_index"].tolist()
        assert told["frame"] == batch["frame_index"].tolist()


def test_findings_are_those_of_validate_with_the_episodes_that_they_are_of(tmp_path):
    root = write_dataset(tmp_path / "dataset", SynthSpec(version="v2.1"))
    (root / "videos/chunk-000/observation.images.top/episode_000003.mp4").unlink()

    with served(root) as ask:
        told = wait_for_findings(ask)
        damaged = ask_json(ask, "/api/episode?episode=3")["cameras"]

    assert told["stage"] == "done", told
    assert told["by_episode"]["3"] == "error"
    kinds = [json.loads(run_program("validate", root, "--json").stdout)["tally"]]
    assert {one["kind"] for one in told["folds"]} == set(kinds[0])
    assert "episode_000003.mp4" in damaged[0]["error"]
    assert damaged[1]["error"] == ""


def wait_for_findings(ask, path="/api/findings"):
    end = time.monotonic() + 120
    while (told := ask_json(ask, path))["stage"] == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    return told


def test_many_files_are_checked_when_the_page_asks_for_it(tiny_dataset, monkeypatch):
    monkeypatch.setattr(Checks, "is_quick", False)

    with served(tiny_dataset) as ask:
        assert ask_json(ask, "/api/findings")["stage"] == "waiting"
        assert wait_for_findings(ask, "/api/findings?start=1")["stage"] == "done"


def test_a_check_that_dies_is_told_and_ends_nothing_else(tiny_dataset, monkeypatch):
    monkeypatch.setattr(site_module, "_PROGRAM", ("-c", "import os, sys; sys.stderr.write('no memory'); os.abort()"))

    with served(tiny_dataset) as ask:
        told = wait_for_findings(ask)
        assert (told["stage"], told["error"]) == ("failed", "no memory")
        assert ask("/frame?episode=0&camera=0&frame=0").status == 200


def test_depth_has_one_brightness_in_all_frames_of_an_episode(tmp_path):
    root = write_deepening(tmp_path / "deep")
    place = rp.open_dataset(str(root)).spec.cameras.index(DEPTH)

    with served(root) as ask:
        pages = [ask(f"/frame?episode=0&camera={place}&frame={frame}") for frame in (0, 35, 69)]

    walls = [wall_of(np.array(Image.open(io.BytesIO(page.content)))) for page in pages]
    assert max(walls) - min(walls) < 8


def test_texts_of_a_dataset_never_become_html():
    scripts = "".join(one.read_text() for one in PAGE.iterdir() if one.name.endswith(".js"))

    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert way not in scripts
    page = PAGE.joinpath("index.html").read_text()
    assert not re.search(r"<script>|\son\w+=|\sstyle=|https?://", page)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--serve", "--out", "a.html"), "--serve shows the whole dataset in the browser: leave out --out"),
        (("--port", "9000"), "--port 9000 is about --serve, which is not given"),
        (("--serve", "--port", "70000"), "a port is a number from 0 to 65535, got 70000"),
    ],
)
def test_serving_what_is_impossible_is_an_error(tiny_dataset, options, message):
    done = run_program("show", tiny_dataset, *options)

    assert done.returncode == 2
    assert message in done.stderr


def test_a_port_that_is_taken_is_an_error_that_names_the_option(tiny_dataset, ask):
    done = run_program("show", tiny_dataset, "--serve", "--port", ask.address[1])

    assert done.returncode == 2
    assert "give another port with --port, or 0 for any free one" in done.stderr


def test_ctrl_c_ends_the_server_and_the_check_that_runs_beside_it(tiny_dataset):
    code = "from raypipe.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "show", str(tiny_dataset), "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
    )
    try:
        line = process.stdout.readline()
        address = urlsplit(re.search(r"http://\S+", line)[0])
        idle = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        idle.request("GET", f"/api/findings?{address.query}")
        assert json.loads(idle.getresponse().read())["stage"] == "running"
        # The connection stays open, as a browser leaves it.
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        idle.close()
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")
    assert str(tiny_dataset) in line


def test_long_episodes_are_drawn_by_every_nth_frame(tmp_path):
    spec = replace(SynthSpec(cameras=()), lengths=(9001,))
    root = write_dataset(tmp_path / "dataset", spec)

    with served(root) as ask:
        told = ask_json(ask, "/api/episode?episode=0")

    assert told["every"] == 3
    assert len(told["curves"][0]["values"][0]) == 3001
