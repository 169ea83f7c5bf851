"""The page of ``raypipe show --serve`` in a real browser: pixels in step, keys, filters, and a stranger's texts."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from chromium import PROGRAM, open_chromium

import raypipe as rp
from raypipe.testing import SynthSpec, read_stamp, write_dataset
from raypipe.views.choose import make_server
from raypipe.views.site import Site

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")

STAMPS = """[...document.querySelectorAll('.screen > *')].map((shown) => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 64;
  const context = canvas.getContext('2d');
  context.drawImage(shown, 0, 0, 64, 64);
  return [...context.getImageData(0, 0, 64, 64).data];
})"""
IS_STILL = "[...document.querySelectorAll('video')].every((one) => one.readyState >= 2 && !one.seeking)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(page, tiny_dataset):
    with served(page, tiny_dataset) as address:
        yield address


@contextmanager
def served(page, root):
    """Give the address of the page, which `page` may open: it has followed the link."""
    server = make_server(Site(rp.open_dataset(str(root))), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        page.open(server.url)
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.close()
        thread.join()


def stamps(page):
    """What the screens show: (episode, frame, camera) each."""
    pixels = [np.array(one, dtype=np.uint8).reshape(64, 64, 4)[..., :3] for one in page.run(STAMPS)]
    found = [read_stamp(one) for one in pixels]
    return [(one.episode, one.frame, one.camera) for one in found]


def text(page, name):
    return page.run(f"document.getElementById({name!r}).textContent")


def test_cameras_show_the_frame_of_the_cursor_also_behind_other_episodes_of_the_file(page, url):
    page.open(f"{url}?episode=2&frame=5")
    page.wait(IS_STILL)

    assert stamps(page) == [(2, 5, 0), (2, 5, 1)]
    for frame in (6, 7):
        page.press("ArrowRight")
        page.wait(IS_STILL)
        assert stamps(page) == [(2, frame, 0), (2, frame, 1)]
    page.press("End")
    page.wait(IS_STILL)
    assert stamps(page) == [(2, 11, 0), (2, 11, 1)]
    assert text(page, "clock") == "frame 11 of 12 · 1.10 s"
    assert page.said == []


def test_the_token_leaves_the_address_bar_and_the_page_opens_again_without_it(page, tiny_dataset):
    with served(page, tiny_dataset) as url:
        assert page.run("location.href") == url
        assert "token" not in page.run("document.documentElement.outerHTML + document.cookie")
        page.open(f"{url}?episode=1")
        assert text(page, "episode-title") == "Episode 1"
        # By another name the browser has no cookie.
        page.call("Page.navigate", url=url.replace("127.0.0.1", "localhost"))
        page.wait("document.body.textContent.includes('raypipe show --serve printed')")
        page.said.clear()


def test_playing_goes_to_the_end_of_the_episode_and_no_further(page, url):
    page.open(f"{url}?episode=0")
    page.wait(IS_STILL)
    page.run(
        "window.frames_seen = []; const clock = document.getElementById('clock'); "
        "new MutationObserver(() => frames_seen.push(clock.textContent)).observe(clock, {childList: true}); 0"
    )

    page.press(" ")
    assert text(page, "play") == "Pause"
    page.wait("document.getElementById('play').textContent === 'Play'")
    page.wait(IS_STILL)

    seen = [int(one.split()[1]) for one in page.run("frames_seen")]
    assert seen == sorted(seen)
    assert seen[-1] == 6
    assert len(set(seen)) >= 4
    # The frame after it in the file is of the next episode.
    assert stamps(page) == [(0, 6, 0), (0, 6, 1)]


def test_keys_go_to_the_next_and_the_previous_episode_of_the_filtered_list(page, url):
    page.open(url)
    page.run(
        "document.getElementById('filter-text').value = 'cube'; "
        "document.getElementById('filters').dispatchEvent(new Event('input')); 0"
    )
    assert text(page, "filter-count") == "3 of 5 episodes"

    page.press("j")
    page.wait("document.getElementById('episode-title').textContent === 'Episode 2'")
    page.press("j")
    page.wait("document.getElementById('episode-title').textContent === 'Episode 4'")
    assert page.run("document.getElementById('next').disabled")
    page.press("k")
    page.wait("document.getElementById('episode-title').textContent === 'Episode 2'")
    assert page.run("location.search") == "?episode=2"


def test_a_video_that_the_browser_cannot_play_is_shown_frame_by_frame(page, url):
    page.open(f"{url}?episode=2&frame=3")
    page.wait(IS_STILL)
    page.run("document.querySelector('video').dispatchEvent(new Event('error')); 0")
    page.wait("document.querySelector('.screen canvas')?.width === 64")
    page.wait(IS_STILL)

    assert stamps(page) == [(2, 3, 0), (2, 3, 1)]
    assert "cannot play the video" in page.run("document.querySelector('.how').textContent")
    page.press(" ")
    page.wait("document.getElementById('play').textContent === 'Play'")
    page.wait(IS_STILL)
    page.wait("document.getElementById('clock').textContent.startsWith('frame 11 ')")
    assert stamps(page) == [(2, 11, 0), (2, 11, 1)]


def test_a_batch_leads_to_the_episodes_of_its_frames(page, url, tiny_dataset):
    page.open(f"{url}?step=1&batch_size=4&seed=3")
    batch = rp.Pipeline(rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=3).batch_at(1)

    page.wait("document.querySelectorAll('.frame img').length === 4")
    page.wait("[...document.querySelectorAll('.frame img')].every((one) => one.complete && one.naturalWidth)")
    page.run("document.querySelector('.frame').click(); 0")
    episode, frame = int(batch["episode_index"][0]), int(batch["frame_index"][0])
    page.wait(f"document.getElementById('episode-title').textContent === 'Episode {episode}'")
    assert text(page, "clock").startswith(f"frame {frame} of ")


def test_texts_of_a_stranger_are_shown_and_do_nothing(page, tmp_path):
    evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    root = write_dataset(tmp_path / "<b>data", SynthSpec(tasks=(evil,), robot_type=evil))

    with served(page, root) as url:
        for view in ("", "?step=0", "?view=findings", "?view=dataset"):
            page.open(f"{url}{view}")
            page.wait("document.getElementById('findings-badge').hidden === false")
            assert page.run("window.hit") is None
            assert page.run("document.querySelectorAll('#main script, #main b b, #side img').length") == 0
        page.open(url)
        assert evil in text(page, "episode-tasks")


def test_findings_filter_the_list_and_stand_beside_their_episode(page, tmp_path):
    root = write_dataset(tmp_path / "dataset", SynthSpec(version="v2.1"))
    (root / "videos/chunk-000/observation.images.top/episode_000003.mp4").unlink()

    with served(page, root) as url:
        page.open(f"{url}?episode=3")
        page.wait("document.getElementById('findings-badge').hidden === false")
        page.run(
            "document.getElementById('filter-findings').value = 'error'; "
            "document.getElementById('filters').dispatchEvent(new Event('input')); 0"
        )

        assert text(page, "filter-count") == "1 of 5 episodes"
        assert "missing" in text(page, "episode-errors")
        assert "episode_000003.mp4" in page.run("document.querySelector('.screen p').textContent")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1400])
def test_the_page_fits_its_window_light_and_dark(page, url, theme, width):
    page.prefer(theme)
    page.resize(width, 800)
    for view in ("?episode=2", "?step=0", "?view=findings", "?view=dataset"):
        page.open(f"{url}{view}")
        assert page.run("document.documentElement.dataset.theme") == theme
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.getElementById('main').scrollWidth <= document.getElementById('main').clientWidth")
