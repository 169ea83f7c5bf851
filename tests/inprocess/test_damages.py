"""Every kind of damage: a pipeline names it, or leaves it out and accounts for exactly the damaged episodes."""

import shutil

import pytest
from batches import frames_of, frames_of_all, frames_of_dataset, local_loader, planned_epoch
from damages import DAMAGES, base_spec

from raypipe.account import lay_out, merge_accounts
from raypipe.account.verdict import check_account
from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError, RaypipeError
from raypipe.pipeline import Pipeline
from raypipe.plan import SINGLE_DATASET
from raypipe.testing import write_dataset

CASES = [(name, version) for name, damage in DAMAGES.items() for version in damage.versions]


def cases(pipeline):
    return [case for case in CASES if DAMAGES[case[0]].pipeline == pipeline]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return {version: write_dataset(folder / version, base_spec(version)) for version in ("v2.1", "v3.0")}


@pytest.fixture
def damaged(sound, tmp_path):
    """Make a damaged copy: its root, and what was hit."""

    def make(name, version):
        root = tmp_path / "dataset"
        shutil.copytree(sound[version], root)
        return root, DAMAGES[name].apply(root)

    return make


def make_pipe(root, **parts):
    return Pipeline(open_dataset(str(root)), batch_size=4, seed=2, order={"live_spans": 2}, **parts)


@pytest.mark.parametrize(("name", "version"), cases("refuses"))
def test_damage_to_the_whole_dataset_is_refused_with_the_file(damaged, name, version):
    root, hit = damaged(name, version)

    with pytest.raises(RaypipeError) as raised:
        list(local_loader(make_pipe(root)))

    assert any(file in str(raised.value) for file in hit.files), str(raised.value)


@pytest.mark.filterwarnings("ignore:.*leaving out")
@pytest.mark.parametrize(("name", "version"), cases("harmless"))
def test_harmless_damage_changes_no_frame(damaged, sound, name, version):
    root, _ = damaged(name, version)
    pipe = make_pipe(root)

    batches = list(local_loader(pipe))

    assert sorted(frames_of_all(batches)) == frames_of_dataset(pipe.config.dataset)


@pytest.mark.parametrize(("name", "version"), cases("bad_episodes"))
def test_damaged_episode_is_named_with_its_file_where_the_run_ends(damaged, name, version):
    root, hit = damaged(name, version)

    with pytest.raises(RaypipeError) as raised:
        list(local_loader(make_pipe(root)))

    text = "; ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert any(f"episode {episode} of {root}" in text.replace("'", "") for episode in hit.episodes), text
    assert any(file in text for file in hit.files), text


@pytest.mark.filterwarnings("ignore:rank . left out")
@pytest.mark.parametrize(("name", "version"), cases("bad_episodes"))
def test_exactly_the_damaged_episodes_are_left_out_and_accounted_for(damaged, name, version):
    root, hit = damaged(name, version)
    pipe = make_pipe(root, on_bad_episode="skip", max_bad_episodes=5)
    world = pipe.plan(world_size=2)
    loaders = [local_loader(pipe, rank, 2) for rank in range(2)]
    if len(hit.episodes) == len(pipe.config.dataset.meta.episodes):
        with pytest.raises(DatasetError, match=r"not one of . episodes can be read"):
            list(loaders[0])
        return

    batches = [list(loader) for loader in loaders]

    assert [len(rank) for rank in batches] == [world.num_steps] * 2
    for rank, found in enumerate(batches):
        for batch, planned in zip(found, planned_epoch(world, rank), strict=True):
            good = [frame for frame in planned if frame[0] not in hit.episodes]
            handed = [f for f, again in zip(frames_of(batch), batch["is_repeat"].tolist(), strict=True) if not again]
            assert [frame for frame in handed if frame[0] not in hit.episodes] == good
    episodes = pipe.config.dataset.meta.episodes
    axis = lay_out([SINGLE_DATASET], [(episodes.episode_index, episodes.length)])
    (verdict,) = check_account(pipe.config.index(), axis, merge_accounts([loader.account() for loader in loaders]))
    assert verdict.is_exact, verdict.describe()
    assert {skip.episode for skip in verdict.skipped} == set(hit.episodes)
