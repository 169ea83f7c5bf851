"""LeRobot's own policies and classes on raypipe's batches. Runs where lerobot is installed: `make test-lerobot`."""

import copy

import pytest
import torch

import raypipe as rp
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

pytest.importorskip("lerobot", reason="lerobot is not installed")
pytestmark = pytest.mark.filterwarnings("default")

SMALL = {"dim_model": 32, "dim_feedforward": 32, "n_heads": 2, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
CAMERAS = (CameraSpec(name="observation.images.top"), CameraSpec(name="observation.images.wrist"))
CHUNK = 6
NO_DOWNLOAD = {"pretrained_backbone_weights": None}
DEPTH = "observation.images.depth"


def act_config(**changes):
    from lerobot.policies.act.configuration_act import ACTConfig

    fields = {**SMALL, "pretrained_backbone_weights": None, "device": "cpu", **changes}
    return ACTConfig(chunk_size=CHUNK, n_action_steps=CHUNK, **fields)


def diffusion_config(**changes):
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    return DiffusionConfig(device="cpu", crop_shape=None, **changes)


def small_diffusion():
    """Drops no last frames: the short episodes would have none left for more than a few steps."""
    sizes = {"down_dims": (16, 32), "n_groups": 4, "spatial_softmax_num_keypoints": 8, "diffusion_step_embed_dim": 16}
    steps = {"horizon": 8, "n_action_steps": 4, "drop_n_last_frames": 0, "num_train_timesteps": 20}
    return diffusion_config(**steps, **sizes, **NO_DOWNLOAD)


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads of torch that wait for each other on a busy machine take a minute for a second's work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("lerobot") / "v30", SynthSpec(lengths=(12, 9, 15), cameras=CAMERAS))


def lerobot_batches(root, config, indices):
    """What LeRobot's loader gives of the frames of these batches, in this order."""
    from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
    from lerobot.datasets.factory import resolve_delta_timestamps

    meta = LeRobotDatasetMetadata("somebody/made", root=root)
    windows = resolve_delta_timestamps(config, meta)
    dataset = LeRobotDataset("somebody/made", root=root, delta_timestamps=windows)
    return list(torch.utils.data.DataLoader(dataset, batch_sampler=[index.tolist() for index in indices])), meta


def train(policy, meta, batches):
    """Train a copy of the policy, and return the loss of every step."""
    from lerobot.policies.factory import make_pre_post_processors

    policy = copy.deepcopy(policy)
    preprocess, _ = make_pre_post_processors(policy.config, dataset_stats=meta.stats)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    policy.train()
    torch.manual_seed(7)
    losses = []
    for batch in batches:
        loss, _ = policy.forward(preprocess(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_policy(config, meta):
    from lerobot.policies.factory import make_policy

    torch.manual_seed(3)
    return make_policy(config, ds_meta=meta)


@pytest.mark.parametrize("make_config", [act_config, small_diffusion])
def test_losses_are_those_of_lerobots_own_loader_on_the_same_frames(root, make_config):
    pipe = rp.lerobot.pipeline(rp.open_dataset(str(root)), make_config(), batch_size=4, seed=0)
    ours = list(rp.lerobot.batches(pipe.loader()).steps(6))
    meta = rp.lerobot.metadata(pipe)
    policy = new_policy(make_config(), meta)

    theirs, their_meta = lerobot_batches(root, make_config(), [batch["index"] for batch in ours])

    losses = train(policy, meta, ours)
    assert losses == train(policy, their_meta, theirs)
    # Diffusion draws how much noise a step has, and six steps tell nothing.
    assert losses[-1] < losses[0] or make_config is small_diffusion


def smolvla_config():
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    return SmolVLAConfig(device="cpu")


def pi0_config():
    from lerobot.policies.pi0.configuration_pi0 import PI0Config

    return PI0Config(device="cpu")


@pytest.mark.parametrize("make_config", [act_config, diffusion_config, smolvla_config, pi0_config])
def test_batches_are_what_lerobots_loader_collates(root, make_config):
    config = make_config()
    pipe = rp.lerobot.pipeline(rp.open_dataset(str(root)), config, batch_size=4, seed=0)
    ours = list(rp.lerobot.batches(pipe.loader()))

    theirs, _ = lerobot_batches(root, config, [batch["index"] for batch in ours])

    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert their_batch.keys() <= our_batch.keys()
        for name, value in their_batch.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(our_batch[name], value, rtol=0, atol=0, msg=name)
                assert our_batch[name].is_contiguous()
            else:
                assert our_batch[name] == value


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_metadata_of_any_format_is_lerobots_of_the_same_data(root, tmp_path, version):
    from lerobot.datasets import LeRobotDatasetMetadata
    from lerobot.utils.feature_utils import dataset_to_policy_features

    same = SynthSpec(lengths=(12, 9, 15), cameras=CAMERAS, version=version)
    theirs = LeRobotDatasetMetadata("somebody/made", root=root)

    ours = rp.lerobot.metadata(rp.open_dataset(str(write_dataset(tmp_path / version, same))))

    assert isinstance(ours, LeRobotDatasetMetadata)
    assert dataset_to_policy_features(ours.features) == dataset_to_policy_features(theirs.features)
    for name in ("fps", "total_frames", "total_episodes"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert list(ours.tasks.index) == list(theirs.tasks.index)
    assert ours.camera_keys == theirs.camera_keys
    for column in ("dataset_from_index", "dataset_to_index", "tasks"):
        assert list(ours.episodes[column]) == list(theirs.episodes[column])
    for name in ("action", "observation.state", *ours.camera_keys):
        for statistic in ("mean", "std", "min", "max"):
            assert ours.stats[name][statistic] == pytest.approx(theirs.stats[name][statistic], abs=1e-6)


def test_metadata_of_a_pipeline_has_the_size_that_it_makes_cameras(root):
    ds = rp.open_dataset(str(root))
    pipe = rp.lerobot.pipeline(ds, act_config(), batch_size=4, seed=0, decode={"resize": (40, 48)})

    shapes = rp.lerobot.metadata(pipe).shapes

    assert shapes["observation.images.top"] == (40, 48, 3)
    assert next(iter(rp.lerobot.batches(pipe.loader())))["observation.images.top"].shape == (4, 3, 40, 48)


def test_act_trains_on_a_mixture_of_formats_and_widths(root, tmp_path):
    other = SynthSpec(version="v2.1", cameras=CAMERAS, action_dim=3, lengths=(8, 8))
    mixture = rp.Mixture([str(root), str(write_dataset(tmp_path / "narrow", other))])
    pipe = rp.lerobot.pipeline(mixture, act_config(), batch_size=4, seed=0)
    meta = rp.lerobot.metadata(pipe)

    losses = train(new_policy(act_config(), meta), meta, rp.lerobot.batches(pipe.loader()).steps(3))

    assert meta.total_episodes == 5
    assert meta.shapes["action"] == mixture.features["action"].shape
    assert all(0 < loss < 1e4 for loss in losses)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A dataset with a depth video, whose statistics are in millimetres."""
    cameras = (CameraSpec(name=DEPTH, kind="depth", gop=4), *CAMERAS)
    return write_dataset(tmp_path_factory.mktemp("lerobot") / "deep", SynthSpec(lengths=(12, 9), cameras=cameras))


@pytest.mark.parametrize("unit", ["mm", "m"])
def test_depth_and_its_statistics_are_in_the_unit_that_lerobot_gives(deep, unit):
    from lerobot.datasets import LeRobotDataset

    pipe = rp.lerobot.pipeline(rp.open_dataset(str(deep)), act_config(), batch_size=4, seed=0)
    theirs = LeRobotDataset("somebody/made", root=deep, depth_output_unit=unit)

    batch = next(iter(rp.lerobot.batches(pipe.loader(), depth_unit=unit)))

    wanted = torch.stack([theirs[index][DEPTH] for index in batch["index"].tolist()])
    # LeRobot rounds to whole millimetres where these are asked for.
    torch.testing.assert_close(batch[DEPTH], wanted, rtol=0, atol=0 if unit == "mm" else 0.000501)
    ours = rp.lerobot.metadata(pipe, depth_unit=unit)
    for statistic in ("mean", "std", "min", "max"):
        assert ours.stats[DEPTH][statistic] == pytest.approx(theirs.meta.stats[DEPTH][statistic])


def test_a_depth_unit_that_lerobot_does_not_know_is_refused(root):
    with pytest.raises(rp.ConfigError, match=r"depth_unit must be one of 'mm', 'm', got 'cm'"):
        rp.lerobot.batches(rp.Pipeline(str(root), batch_size=2, seed=0).loader(), depth_unit="cm")


def test_windows_are_those_that_lerobot_resolves(root):
    from lerobot.datasets import LeRobotDatasetMetadata
    from lerobot.datasets.factory import resolve_delta_timestamps

    theirs = LeRobotDatasetMetadata("somebody/made", root=root)

    for config in (act_config(), diffusion_config()):
        ours = rp.lerobot.delta_timestamps(rp.open_dataset(str(root)), config)
        assert ours == resolve_delta_timestamps(config, theirs)


def test_frames_are_those_of_lerobots_sampler_where_the_policy_drops_the_last(root):
    from lerobot.datasets import EpisodeAwareSampler

    meta = rp.lerobot.metadata(rp.open_dataset(str(root)))
    columns = meta.episodes["dataset_from_index"], meta.episodes["dataset_to_index"]

    pipe = rp.lerobot.pipeline(rp.open_dataset(str(root)), diffusion_config(), batch_size=2, seed=0)

    found = sorted(index for batch in pipe.loader() for index in batch["index"].tolist())
    assert found == sorted(EpisodeAwareSampler(*columns, drop_n_last_frames=diffusion_config().drop_n_last_frames))


def test_a_mixture_says_itself_which_frames_it_drops(root):
    mixture = rp.Mixture([str(root)])

    with pytest.raises(rp.ConfigError, match=r"'drop_last_frames': 7"):
        rp.lerobot.pipeline(mixture, diffusion_config(), batch_size=2, seed=0)


def test_batches_stand_where_the_loader_stands_and_its_transform_runs_first(root):
    pipe = rp.lerobot.pipeline(rp.open_dataset(str(root)), act_config(), batch_size=4, seed=0)
    seen = []

    def remember(batch, seeds):
        seen.append(batch["observation.images.top"].dtype)
        return batch

    loader = pipe.loader(transform=remember)
    plain = list(loader.steps(3))

    rest = list(rp.lerobot.batches(loader))

    assert {batch["observation.images.top"].dtype for batch in plain} == set(seen) == {torch.uint8}
    assert {batch["observation.images.top"].dtype for batch in rest} == {torch.float32}
    assert len(plain) + len(rest) == len(pipe.loader())


def test_statistics_that_policies_would_miss_are_told(root):
    ds = rp.open_dataset(str(root))
    stats = {name: dict(values) for name, values in ds.stats.items() if name != "action"}
    stats["observation.images.top"]["std"] = stats["observation.images.top"]["std"] * 0 + 7e-5
    ds.__dict__["stats"] = stats

    with (
        pytest.warns(UserWarning, match=r"no statistics of action"),
        pytest.warns(UserWarning, match=r"stored std of observation.images.top is below 0.001.*IMAGENET_STATS"),
    ):
        rp.lerobot.metadata(ds)
