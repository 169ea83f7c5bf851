"""A mixture as users hold it: what it says of itself, how it becomes a pipeline, and its account over a change."""

import pickle

import pyarrow.parquet as pq
import pytest
from batches import local_loader, rows_spec
from damages import edit_info

from raypipe import DecodeSpec
from raypipe.account import write_rank_account
from raypipe.errors import ConfigError, DatasetError
from raypipe.mixture import Mixture, open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.views.account import StepQuery, check_run, locate_recorded


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    lengths = {"small": (7, 5), "large": (12, 9, 10, 8), "other": (6, 6, 6)}
    for name, frames in lengths.items():
        write_dataset(folder / name, rows_spec(frames))
    camera = CameraSpec(name="observation.images.top", height=32, width=32, kind="image")
    write_dataset(folder / "camera", SynthSpec(lengths=(4, 3), cameras=(camera,), state_dim=2, action_dim=2))
    return {name: str(folder / name) for name in (*lengths, "camera")}


def mix(members, **settings):
    return Mixture(members, progress=False, **settings)


def test_a_mixture_says_what_an_epoch_takes_of_each(roots):
    mixture = mix([(roots["small"], 1), (roots["large"], 2)])

    assert mixture.shares == {"small": 17, "large": 34}
    assert len(mixture) == 51
    assert "2 datasets, 6 episodes, 51 frames an epoch" in repr(mixture)
    assert mixture.index().num_frames == 51


def test_without_weights_an_epoch_has_every_frame_once(roots):
    assert mix([roots["small"], roots["large"]]).shares == {"small": 12, "large": 39}


def test_a_member_of_weight_zero_is_not_even_opened_and_noted(roots):
    mixture = mix([(roots["small"], 1), ("/there/is/nothing", 0)])

    assert mixture.names == ("small",)
    assert [str(note) for note in mixture.notes] == ["nothing: left out: its weight is 0"]


def test_what_is_said_and_decides_nothing_is_noted(roots):
    mixture = mix([{"root": roots["small"], "weight": 3, "tolerance_s": 0.1}, roots["large"]], weights="sqrt", rate=10)

    assert [str(note) for note in mixture.notes] == [
        "small: its weight 3 decides nothing: weights is 'sqrt'",
        "small: its tolerance_s decides nothing: windows go by the rate",
    ]


def test_members_without_a_frame_are_all_named(roots):
    members = [{"root": roots[name], "selection": {"drop_last_frames": 50}} for name in ("small", "large")]

    with pytest.raises(ConfigError) as caught:
        mix([*members, roots["other"]])

    assert "'small'" in str(caught.value)
    assert "'large'" in str(caught.value)
    assert "weight 0" in str(caught.value)


def test_a_dataset_without_episodes_is_a_bad_member(roots, tmp_path):
    root = tmp_path / "empty"
    write_dataset(root, rows_spec((3,)))
    (table,) = root.glob("meta/episodes/*/*.parquet")
    pq.write_table(pq.read_table(table).slice(0, 0), table)
    edit_info(root, lambda info: info.update(total_episodes=0, total_frames=0))

    with pytest.raises(DatasetError, match=r"empty \(.*\): it has no episodes"):
        mix([roots["small"], str(tmp_path / "empty")])
    with pytest.warns(UserWarning, match="it has no episodes"):
        mixture = mix([roots["small"], str(tmp_path / "empty")], on_bad_dataset="skip")
    assert mixture.names == ("small",)


def test_selections_are_those_of_the_members(roots):
    mixture = mix([{"root": roots["large"], "selection": {"exclude": (0,)}}])

    assert mixture.shares == {"large": 27}
    with pytest.raises(ConfigError, match="give each member its own selection"):
        Pipeline(mixture, batch_size=4, seed=0, selection={"exclude": (1,)})
    with pytest.raises(ConfigError, match="drop_last_frames must be an integer"):
        mix([{"root": roots["large"], "selection": {"drop_last_frames": 1.5}}])


@pytest.mark.parametrize("decode", [{}, DecodeSpec(where="rank"), {"resize": (16, 16)}])
def test_the_size_of_cameras_is_that_of_the_mixture(roots, decode):
    pipe = Pipeline(mix([roots["camera"]], resize=(16, 16)), batch_size=4, seed=0, decode=decode)

    (batch, *_) = local_loader(pipe)

    assert batch["observation.images.top"].shape[2:] == (16, 16)


def test_a_size_may_be_said_by_decoding_alone_and_not_by_both(roots):
    pipe = Pipeline(mix([roots["camera"]]), batch_size=4, seed=0, decode={"resize": (8, 8)})

    assert pipe.config.dataset.features["observation.images.top"].shape == (3, 8, 8)
    with pytest.raises(ConfigError, match=r"resize=\(16, 16\) with fit='stretch', and decode has"):
        Pipeline(mix([roots["camera"]], resize=(16, 16)), batch_size=4, seed=0, decode={"resize": (8, 8)})


def test_a_mixture_travels_with_its_windows(roots):
    mixture = mix([roots["small"], roots["large"]]).windowed(offsets={"action": [0, 1]})

    copy = pickle.loads(pickle.dumps(mixture))

    assert copy.schema.windows == {"action": 2}
    assert copy.shares == mixture.shares
    assert [one.window.offsets for one in copy.datasets] == [{"action": (0, 1)}] * 2


def test_unknown_settings_and_files_are_refused(roots, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        mix([roots["small"]], weight=3)
    with pytest.raises(ConfigError, match="is no mixture file"):
        mix(roots["small"])
    with pytest.raises(ConfigError, match="a mixture file must be a local one"):
        open_dataset("memory://somewhere/mixture.yaml")


def test_open_dataset_takes_a_mixture_file_and_nothing_that_is_of_one_dataset(roots, tmp_path):
    path = tmp_path / "mixture.toml"
    path.write_text(f'[[datasets]]\nroot = "{roots["small"]}"\nweight = 1\n')

    assert open_dataset(str(path)).names == ("small",)
    with pytest.raises(ConfigError, match=r"cameras=.* is of one dataset"):
        open_dataset(str(path), cameras=["observation.images.top"])


@pytest.fixture
def changed_run(roots, tmp_path):
    """A run of one epoch with one mixture, and of one with another; the folder of its last checkpoint."""
    members = [(roots["small"], 1), (roots["large"], 2)]
    first = local_loader(Pipeline(mix(members), batch_size=4, seed=0))
    list(first)
    changed = Pipeline(mix([(roots["small"], 2), (roots["other"], 1)]), batch_size=4, seed=0, allow_mixture_change=True)
    second = local_loader(changed)
    second.load_state_dict(first.state_dict())
    second.load_account(first.account().parts)
    list(second)
    write_rank_account(tmp_path / "checkpoint/raypipe", second.account(), 0, 1)
    return tmp_path / "checkpoint"


def test_the_account_begins_anew_where_the_mixture_changed_and_is_exact(changed_run):
    checked = check_run(changed_run)

    assert checked.is_exact, checked.describe()
    assert [(verdict.epoch, verdict.num_emitted) for verdict in checked.verdicts] == [(1, 30)]


def test_steps_of_a_run_whose_mixture_changed_are_asked_for_by_epoch(changed_run):
    with pytest.raises(ConfigError, match=r"changed at epoch 1, and its account begins there(.|\n)*--epoch"):
        locate_recorded(changed_run, StepQuery(step=0, rank=0))
    with pytest.raises(ConfigError, match="epoch 0 was of the one before"):
        locate_recorded(changed_run, StepQuery(step=0, rank=0, epoch=0))

    located = locate_recorded(changed_run, StepQuery(step=0, rank=0, epoch=1))

    assert {frame.dataset for frame in located.frames} <= {"small", "other"}


def test_an_account_beside_another_mixture_file_says_what_differs(changed_run, roots, tmp_path):
    path = tmp_path / "now.yaml"
    path.write_text(f"datasets: [{{root: {roots['small']}, weight: 1}}, {{root: {roots['other']}, weight: 1}}]\n")

    with pytest.raises(ConfigError, match="frames per epoch of 'small': 20 in the state, 15 here"):
        check_run(changed_run, root=str(path))


def test_a_pipeline_of_a_mixture_gives_the_chosen_features_alone(roots, tmp_path):
    mixture = mix([roots["small"], roots["camera"]], on_missing="fill")
    camera = "observation.images.top"

    lean = next(iter(local_loader(Pipeline(mixture, batch_size=4, seed=0, features=["action"]))))
    seen = Pipeline(mixture, batch_size=4, seed=0, features=[camera], decode={"resize": (16, 16)})

    index = {"timestamp", "frame_index", "episode_index", "index", "task_index", "task"}
    added = {"dataset", "dataset_index", "robot_type", "augment_seed"}
    assert set(lean) == {*index, *added, "action"}
    assert set(next(iter(local_loader(seen)))) == {*index, *added, camera, f"{camera}_is_missing"}
    assert seen.config.dataset.features[camera].shape == (3, 16, 16)
    assert list(mixture.features) == list(mix([roots["small"], roots["camera"]], on_missing="fill").features)
    with pytest.raises(ConfigError, match=r"the mixture has no feature 'actoin'; did you mean 'action'\?"):
        mixture.select_features(["actoin"])
    sized = mix([roots["small"], roots["camera"]], on_missing="fill", resize={camera: (16, 16)})
    assert set(next(iter(local_loader(Pipeline(sized, batch_size=4, seed=0, features=["action"]))))) == set(lean)


def test_a_mixture_file_opened_as_a_dataset_says_where_its_samples_are(roots, tmp_path):
    (tmp_path / "mix.yaml").write_text(f"datasets: [{roots['small']}, {roots['large']}]\n")
    opened = open_dataset(str(tmp_path / "mix.yaml"))

    with pytest.raises(ConfigError, match=r"rp\.Mixture is mixture\.datasets\[0\], of 'small', 'large'.*batch_at\(0\)"):
        opened[0]
    with pytest.raises(ConfigError, match="a mixture has no sample 0"):
        next(iter(opened))

    assert opened.datasets[0][0]["action"].shape == (2,)
    assert len(Pipeline(opened, batch_size=4, seed=0).batch_at(0)["action"]) == 4
