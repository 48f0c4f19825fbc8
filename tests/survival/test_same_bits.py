"""A run that is killed and goes on with another number of devices and processes: an undisturbed run's bits and rows."""

from dataclasses import replace

import pytest

from tests.support.job_process import Job, make_uninterrupted_run
from tests.survival.test_kill import assert_each_logged_step_once

STEPS = 30
TRAIN = f"{{total_steps: {STEPS}, global_batch_examples: 24, micro_batch_examples: 1, same_bits_devices: 24}}"
OPTIONS = (
    f"config.train={TRAIN}",
    "checkpoint.every_steps=4",
    "logging.every_steps=1",
    "config.eval={every_steps: 10, batches: 2}",
    "config.optimizer.clip_norm=0.5",
)
JOBS = {
    "gpt": ("specs/gpt_nano.yaml", ("config.model.dropout=0.1",)),
    "llama": ("specs/llama_nano.yaml", ()),
    "packed": ("specs/gpt_nano.yaml", ("config.data.packing=documents",)),
    "stages": (
        "specs/llama_nano.yaml",
        (
            "config.stages=[{from_step: 9, set: {train.global_batch_examples: 48, data.sequence_length: 32}}, "
            "{from_step: 20, set: {schedule: {name: linear}, optimizer.clip_norm: 0.2}}]",
        ),
    ),
    "int8": ("specs/gpt_nano.yaml", ("config.precision={compute: bfloat16, matmul: int8}",)),
    "int8, stochastic": (
        "specs/gpt_nano.yaml",
        ("config.precision={compute: bfloat16, matmul: int8, gradient_rounding: stochastic}",),
    ),
    "averaged": ("specs/gpt_nano.yaml", ("config.ema={decays: [0.9], evaluate: true}", "config.metrics.norms=groups")),
}
DATA, CUT = "topology.mesh={data: auto, fsdp: 1}", "topology.mesh={data: 1, fsdp: auto}"
# (devices of a process, processes, mesh): one after another.
PLACES = [(8, 1, DATA), (1, 1, DATA), (1, 3, DATA), (2, 2, CUT), (4, 1, DATA), (1, 2, CUT), (3, 1, DATA), (6, 1, CUT)]
pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def _compiled_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.parametrize("name", JOBS)
def test_resumes_on_other_meshes_change_no_bit(name, tmp_path):
    spec, options = JOBS[name]
    options = (*OPTIONS, *options)
    job = Job(spec, tmp_path / "run", options)
    for number, (devices, processes, mesh) in enumerate(PLACES):
        here = replace(job, devices=devices).with_options(mesh)
        attempt = here.start() if processes == 1 else here.launch(processes)
        if number + 1 == len(PLACES):
            attempt.expect(0)
            break
        attempt.wait_until(lambda step=4 * (number + 1): any(each >= step for each in job.committed()), "the next step")
        attempt.kill_tree()
    assert_each_logged_step_once(job, 1, 10, STEPS)
    assert job.outcome() == make_uninterrupted_run(spec, (*options, DATA), devices=8).outcome()


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ("config.train.same_bits_devices=24", "config.train.same_bits_devices"),
        ("config.train.same_bits_devices=null", "config.train.same_bits_devices"),
        ("config.train.micro_batch_examples=2", "config.train.micro_batch_examples"),
    ],
)
def test_a_changed_reduction_order_is_refused(mine, message, tmp_path):
    changes = (*OPTIONS, DATA, "config.train.same_bits_devices=12")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", changes, devices=4)
    attempt = job.start()
    attempt.wait_until(lambda: bool(job.committed()), "a checkpoint")
    attempt.kill_tree()
    ended = job.with_options(mine).start()
    ended.expect(2)
    assert message in ended.output
