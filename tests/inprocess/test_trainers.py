"""Trainers of others take a loader as it is, and go on exactly from checkpoints of their own."""

import re
from dataclasses import replace

import pytest
import torch
from batches import frames_of, local_loader, planned_epoch, rows_spec
from doc_pages import PAGES, fenced

from raypipe.pipeline import Pipeline
from raypipe.testing import SynthSpec, numbered_cameras, write_dataset

# Trainers warn of much that is as it should be here: no workers, no GPU, no logger.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """57 frames in an epoch of 15 batches."""
    root = write_dataset(tmp_path_factory.mktemp("rows") / "dataset", replace(rows_spec(), state_dim=6, action_dim=6))
    return Pipeline(root, batch_size=4, seed=1, order={"live_spans": 3})


def seen_by_lightning(pipe, folder, *, checkpoint=None):
    """Return what three epochs hand to Lightning, and its numbers of the batches; checkpoints are in `folder`."""
    lightning = pytest.importorskip("lightning", reason="needs the package lightning")

    class Policy(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(6, 6)
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append((batch_idx, frames_of(batch)))
            return self.head(batch["observation.state"]).sub(batch["action"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=5, save_top_k=-1, filename="{step}", auto_insert_metric_name=False
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    policy = Policy()
    lightning.Trainer(max_epochs=3, callbacks=[saving], **quiet).fit(policy, local_loader(pipe), ckpt_path=checkpoint)
    return policy.seen


def test_lightning_goes_on_after_the_batch_of_its_own_checkpoint(pipe, tmp_path):
    whole = seen_by_lightning(pipe, tmp_path / "whole")

    # Within an epoch, and at the end of one.
    for step in (5, 20, 30):
        rest = seen_by_lightning(pipe, tmp_path / f"rest{step}", checkpoint=tmp_path / "whole" / f"{step}.ckpt")

        assert rest == whole[step:]
    planned = [frames for epoch in range(3) for frames in planned_epoch(pipe.plan(epoch=epoch), 0)]
    assert [frames for _, frames in whole] == planned


def test_accelerate_keeps_where_a_loader_stands(pipe, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")
    stopped, resumed = local_loader(pipe), local_loader(pipe)
    saver, reader = accelerate.Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    saver.register_for_checkpointing(stopped)
    reader.register_for_checkpointing(resumed)
    for _ in zip(range(4), stopped, strict=False):
        pass

    saver.save_state(tmp_path / "state")
    reader.load_state(tmp_path / "state")

    assert [frames_of(batch) for batch in resumed] == planned_epoch(pipe.plan(), 0)[4:]


@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("other-trainers", "lightning"),
        ("other-trainers", "accelerate"),
        ("augmentation", "torchvision"),
        ("augmentation", "kornia"),
    ],
)
def test_a_page_runs_as_printed_where_the_package_is(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"needs the package {package}")
    cameras = numbered_cameras(1, "96x96", "h264", 2) if page == "augmentation" else ()
    write_dataset(tmp_path / "demo-data", SynthSpec(lengths=(40, 60, 50), cameras=cameras))
    monkeypatch.chdir(tmp_path)
    blocks = fenced("py", PAGES / f"{page}.md")

    (code,) = [code for code in blocks if re.search(rf"^(import|from) {package}", code, re.MULTILINE)]
    exec(compile(code, f"{page}.md", "exec"), {"__name__": "page"})
