"""The examples on data of arrays: their loss does not depend on the split of the batch, nor on padding."""

from pathlib import Path

import numpy as np
import pytest

from runner import BaseTrainer, RestoreableJob
from runner.errors import InvalidError
from runner.spec import load_document, load_job_class, validate_spec
from tests.support.tiny_jobs import ROOT, read_rows

SMALL = {"vit_nano": "config.model.layers=1", "mae_nano": "config.model.layers=1", "clip_nano": "config.model.group=4"}


def make_job(name: str, directory: Path, *options: str) -> BaseTrainer:
    """Return the job of a shipped spec for two steps of 32 examples, the last of them evaluated."""
    train = "{total_steps: 2, global_batch_examples: 32}"
    settings = (f"directory={directory}", f"config.train={train}", "config.schedule={}", "config.eval.batches=1")
    document = load_document(ROOT / "specs" / f"{name}.yaml", (*settings, "logging.every_steps=1", *options))
    job: BaseTrainer = load_job_class(document, BaseTrainer)(validate_spec(document), document)
    return job


@pytest.mark.soak
@pytest.mark.parametrize("name", ["clip_nano", "vit_nano", "mae_nano"])
def test_the_split_of_the_batch_changes_a_loss_by_rounding_alone(name: str, tmp_path: Path) -> None:
    rows = []
    for mesh, micro_batch in (("{data: 8}", 4), ("{data: 2, fsdp: 4}", 4), ("{data: 1, tensor: 8}", 32)):
        options = f"topology.mesh={mesh}", f"config.train.micro_batch_examples={micro_batch}", SMALL[name]
        job = make_job(name, tmp_path / f"{len(rows)}", *options)
        job()
        rows.append(read_rows(tmp_path / f"{len(rows)}"))
    for other in rows[1:]:
        for one, same in zip(rows[0], other, strict=True):
            for key in ("train/loss", "train/accuracy", "train/grad_norm"):
                np.testing.assert_allclose(one[key], same[key], rtol=2e-4, err_msg=key)
        np.testing.assert_allclose(rows[0][-1]["val/loss"], other[-1]["val/loss"], rtol=2e-4)


@pytest.mark.soak
def test_padding_changes_no_metric(tmp_path: Path) -> None:
    """The whole set of 30 examples, in batches of different sizes."""
    found = []
    for size in (32, 64):
        options = ("config.eval.batches=10", f"config.eval.global_batch_examples={size}", "config.model.group=4")
        smaller = ("config.data.options.examples=600", "config.model.image.layers=1", "config.model.image.width=16")
        make_job("clip_nano", tmp_path / f"{size}", *options, *smaller)()
        found.append(read_rows(tmp_path / f"{size}")[-1])
    np.testing.assert_allclose(found[0]["val/loss"], found[1]["val/loss"], rtol=1e-5)
    assert found[0]["val/accuracy"] == pytest.approx(found[1]["val/accuracy"], rel=1e-6)


# Keys that size an axis of an array, for the jobs that have no such test of their own.
AXES = [
    *(("vit_nano", f"config.model.{key}") for key in ("layers", "width", "heads", "patch", "classes")),
    *(("mae_nano", f"config.model.{key}") for key in ("decoder_layers", "width", "patch", "visible_patches")),
    *(("clip_nano", f"config.model.{key}") for key in ("image.width", "image.classes", "text_layers", "group")),
    ("counter", "config.width"),
]


@pytest.mark.parametrize(("name", "key"), AXES)
def test_a_size_that_no_axis_can_have_is_refused_with_its_key(name: str, key: str) -> None:
    document = load_document(ROOT / "specs" / f"{name}.yaml", (f"{key}={10**12}",))
    with pytest.raises(InvalidError, match="2147483648") as caught:
        load_job_class(document, RestoreableJob)(validate_spec(document), document)
    assert key.rpartition(".")[2] in str(caught.value)


@pytest.mark.daily(1)
@pytest.mark.parametrize("group", [3, 8])
def test_groups_of_captions_must_stay_whole(tmp_path: Path, group: int) -> None:
    """Each of eight devices has a micro-batch of 4."""
    with pytest.raises(InvalidError, match=rf"config\.model\.group={group} does not divide a micro-batch of"):
        make_job("clip_nano", tmp_path / "run", f"config.model.group={group}", "config.train.micro_batch_examples=4")()
