"""LeRobot's own training script on raypipe's batches. Runs where lerobot is installed: `make test-lerobot`."""

import inspect
import logging
from importlib.metadata import version
from types import ModuleType

import pytest

import raypipe as rp
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

pytest.importorskip("lerobot", reason="lerobot is not installed")
from raypipe.lerobot import VERSION_TRIED
from raypipe.lerobot.trainer import TrainerFeed, check_script, run_lerobot_train

pytestmark = pytest.mark.filterwarnings("default")

POLICY = {
    **{"type": "act", "device": "cpu", "push_to_hub": "false", "pretrained_backbone_weights": "null"},
    **{"chunk_size": 4, "n_action_steps": 4, "dim_model": 32, "dim_feedforward": 32, "n_heads": 2},
    **{"n_encoder_layers": 1, "n_vae_encoder_layers": 1},
}


@pytest.fixture(autouse=True)
def _logging():
    """LeRobot sets up the log of its process."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level


def arguments(root, output, **settings):
    given = {"dataset.repo_id": "somebody/made", "dataset.root": root, "output_dir": output, "batch_size": 4}
    given |= {"log_freq": 1, "num_workers": 0, **{f"policy.{name}": value for name, value in POLICY.items()}}
    return [f"--{name}={value}" for name, value in {**given, **settings}.items()]


def read_checkpoint(output, step):
    """The weights of a checkpoint, and where its data stands."""
    folder = output / "checkpoints" / f"{step:06d}"
    return (folder / "pretrained_model/model.safetensors").read_bytes(), rp.train.read_state(folder)


@pytest.mark.parametrize("format_version", ["v2.1", "v3.0"])
def test_lerobots_checkpoint_goes_on_with_the_very_next_batch(tmp_path, format_version):
    root, run = write_dataset(tmp_path / "data", SynthSpec(version=format_version, lengths=(9, 5))), tmp_path / "run"
    run_lerobot_train(arguments(root, run, steps=6, save_freq=2))
    whole, state = read_checkpoint(run, 6)

    # Epoch 0 has 4 batches: the end of it lies behind the checkpoint.
    checkpoint = run / "checkpoints/000002/pretrained_model/train_config.json"
    run_lerobot_train([f"--config_path={checkpoint}", "--resume=true", "--steps=6"])

    assert read_checkpoint(run, 6) == (whole, state)
    assert state["epoch"] == 1


def test_its_steps_are_the_batches_of_the_pipeline(tmp_path):
    root, run = write_dataset(tmp_path / "data", SynthSpec(lengths=(9, 5))), tmp_path / "run"

    run_lerobot_train(arguments(root, run, steps=3, seed=5))

    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(run / "checkpoints/000003/pretrained_model")
    pipe = rp.lerobot.pipeline(rp.open_dataset(str(root)), config, batch_size=4, seed=5)
    assert rp.train.read_state(run / "checkpoints/000003") == pipe.state_at(3)


def test_episodes_are_held_out_as_lerobot_does(tmp_path):
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets.factory import make_train_eval_datasets
    from lerobot.policies.act.configuration_act import ACTConfig

    root = write_dataset(tmp_path / "data", SynthSpec(lengths=(9, 5, 7, 6, 4)))
    wanted = DatasetConfig(repo_id="somebody/made", root=str(root), eval_split=0.3, episodes=[0, 1, 3, 4])
    config = TrainPipelineConfig(dataset=wanted, policy=ACTConfig(device="cpu", chunk_size=4, n_action_steps=4))

    fed = TrainerFeed().make_datasets(config)

    for ours, theirs in zip(fed, make_train_eval_datasets(config), strict=True):
        assert set(ours.pipe.config.index().episode.tolist()) == set(theirs.episodes)
        assert (ours.num_frames, ours.num_episodes) == (theirs.num_frames, theirs.num_episodes)


def test_a_run_with_evaluation_and_image_transforms_ends_well(tmp_path, capfd):
    root, run = write_dataset(tmp_path / "data", SynthSpec(version="v2.1", lengths=(9, 5, 7, 6))), tmp_path / "run"
    held_out = {"dataset.eval_split": 0.3, "eval_steps": 1, "max_eval_samples": 6}

    run_lerobot_train(arguments(root, run, steps=2, **held_out, **{"dataset.image_transforms.enable": "true"}))

    assert capfd.readouterr().err.count("eval_loss=") == 2


@pytest.mark.parametrize(("unit", "far"), [("mm", 2400.0), ("m", 2.4)])
def test_depth_comes_in_the_unit_that_is_asked_for(tmp_path, unit, far):
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.act.configuration_act import ACTConfig

    depth = "observation.images.depth"
    cameras = (CameraSpec(name=depth, kind="depth", gop=4), CameraSpec(name="observation.images.top"))
    root = write_dataset(tmp_path / "data", SynthSpec(lengths=(9, 5), cameras=cameras))
    wanted = DatasetConfig(repo_id="somebody/made", root=str(root), depth_output_unit=unit)
    config = TrainPipelineConfig(dataset=wanted, policy=ACTConfig(device="cpu"), batch_size=4, steps=2)
    feed = TrainerFeed()

    fed, _ = feed.make_datasets(config)
    batch = next(iter(feed.make_loader(fed)))

    feed.close()
    assert batch[depth].max().item() == pytest.approx(far)
    assert fed.meta.stats[depth]["max"].max() == pytest.approx(far)


def test_a_checkpoint_of_lerobot_alone_starts_the_data_anew_and_says_so(tmp_path):
    root, run = write_dataset(tmp_path / "data", SynthSpec(lengths=(9, 5))), tmp_path / "run"
    run_lerobot_train(arguments(root, run, steps=2))
    for path in (run / "checkpoints/000002/raypipe").rglob("*.json"):
        path.unlink()

    config = run / "checkpoints/000002/pretrained_model/train_config.json"
    with pytest.warns(UserWarning, match="saved by lerobot-train without raypipe"):
        run_lerobot_train([f"--config_path={config}", "--resume=true", "--steps=3"])


def test_the_script_is_the_one_that_was_tried():
    """A tripwire: with another LeRobot, read its script again, try it, and raise VERSION_TRIED."""
    from lerobot.scripts import lerobot_train as script

    source = inspect.getsource(script.train)

    assert version("lerobot") == VERSION_TRIED
    check_script(script)
    assert source.count("torch.utils.data.DataLoader(") == 2
    assert source.count("make_train_eval_datasets(cfg)") == 2
    assert source.count(" save_checkpoint(") == source.count("should_save_checkpoint(step") == 1
    assert "dl_iter = cycle(dataloader)" in source


def test_after_a_run_the_script_is_lerobots_own_again(tmp_path):
    import torch
    from lerobot.scripts import lerobot_train as script

    before = script.make_train_eval_datasets

    with pytest.raises(rp.DatasetError, match="nowhere"):
        run_lerobot_train(arguments(tmp_path / "nowhere", tmp_path / "run"))

    assert script.torch is torch
    assert script.make_train_eval_datasets is before


def test_another_script_is_an_error_before_anything_is_trained():
    with pytest.raises(rp.ConfigError, match=r"no make_train_eval_datasets, .*pip install lerobot==0\.6\.1"):
        check_script(ModuleType("another"))


def test_a_run_on_other_machines_is_refused(tmp_path):
    with pytest.raises(rp.ConfigError, match=r"--job\.target"):
        run_lerobot_train(arguments("data", tmp_path / "run", **{"job.target": "a10g-small"}))
