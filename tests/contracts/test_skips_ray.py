"""Bad data on a real Ray: left out by the rank that gets it, counted for all of them, and accounted for."""

import pytest
from batches import MODES, WINDOWS, frames_of, planned_epoch, varied_spec
from ray_session import run_ranks

from raypipe.account import lay_out, merge_accounts
from raypipe.account.verdict import check_account
from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.pipeline import Pipeline
from raypipe.plan import SINGLE_DATASET
from raypipe.testing import write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")

NO_ROWS, NO_VIDEO = 2, 6


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A dataset with windows on everything, of which an episode has no rows and another no whole video."""
    root = write_dataset(tmp_path_factory.mktemp("skips") / "dataset", varied_spec("v2.1"))
    (root / f"data/chunk-000/episode_{NO_ROWS:06d}.parquet").unlink()
    (video,) = (root / "videos").rglob(f"episode_{NO_VIDEO:06d}.mp4")
    video.write_bytes(video.read_bytes()[:200])
    return open_dataset(str(root)).windowed(offsets=WINDOWS)


@pytest.mark.filterwarnings("ignore:rank . left out")
@pytest.mark.parametrize(("mode", "spans_per_block"), [("rank", 3), ("rank", 1), ("cluster", 2)])
def test_bad_episodes_are_left_out_on_their_ranks_and_no_other_frame_moves(damaged, mode, spans_per_block):
    pipe = Pipeline(
        damaged,
        batch_size=4,
        seed=5,
        order={"live_spans": 3},
        decode=MODES[mode],
        feed={"spans_per_block": spans_per_block},
        on_bad_episode="skip",
        max_bad_episodes=2,
    )
    loaders = pipe.loaders(2, progress=False)

    ranks = run_ranks(loaders)

    world = pipe.plan(world_size=2)
    for rank, batches in enumerate(ranks):
        good = [[f for f in batch if f[0] not in (NO_ROWS, NO_VIDEO)] for batch in planned_epoch(world, rank)]
        found = [
            [f for f, again in zip(frames_of(batch), batch["is_repeat"].tolist(), strict=True) if not again]
            for batch in batches
        ]
        assert found == good
    episodes = damaged.meta.episodes
    axis = lay_out([SINGLE_DATASET], [(episodes.episode_index, episodes.length)])
    (verdict,) = check_account(pipe.config.index(), axis, merge_accounts([loader.account() for loader in loaders]))
    assert verdict.is_exact, verdict.describe()
    assert {skip.episode for skip in verdict.skipped} == {NO_ROWS, NO_VIDEO}
    assert loaders[0].world_stats().skipped_frames == verdict.num_skipped == 12 + 10


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_the_budget_is_of_all_ranks_together(damaged):
    pipe = Pipeline(damaged, batch_size=4, seed=5, order={"live_spans": 3}, on_bad_episode="skip", max_bad_episodes=1)

    with pytest.raises(DatasetError, match="2 of 9 episodes are bad") as raised:
        run_ranks(pipe.loaders(2, progress=False))

    assert f"episode {NO_ROWS} of" in str(raised.value)
    assert f"episode {NO_VIDEO} of" in str(raised.value)
