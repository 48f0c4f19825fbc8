"""All that a training run may carry besides a plain model, killed again and again: an undisturbed run's bits and rows.

A table: what is new joins it by a line.
"""

import signal
from typing import NamedTuple

import pytest

from runner.checkpoint.manifest import CHECKPOINTS
from tests.support.job_process import Job, make_uninterrupted_run
from tests.survival.test_kill import NANO, TRAINER_DELAYS, assert_each_logged_step_once, kill_before_done, storm

GPT, EXPERTS, LLAMA = "specs/gpt_nano.yaml", "specs/moe_nano.yaml", "specs/llama_nano.yaml"
CUT = "topology.mesh={data: 1, fsdp: auto, tensor: 1}"
BASE = "BASE"  # the last checkpoint of another run


class Feature(NamedTuple):
    """A spec and its options; and the devices of one process, and of each of two."""

    spec: str
    options: tuple[str, ...] = ()
    devices: tuple[int, int] = (1, 1)


FEATURES = {
    "experts": Feature(EXPERTS),
    "axes": Feature(
        EXPERTS,
        ("topology.mesh={data: 1, fsdp: 2, sequence: 2, expert: 2}", "config.data.packing=documents"),
        devices=(8, 4),
    ),
    "riders": Feature(
        GPT,
        (
            "config.ema={decays: [0.9, 0.99], evaluate: true}",
            "config.noise_scale={decay: 0.9}",
            "config.precision.params=bfloat16",
            "config.precision.rounding=stochastic",
        ),
    ),
    "stability": Feature(
        GPT,
        (
            # About one step in six is half a deviation above the mean.
            "config.stability={skip_update: {grad_norm_above: {sigmas: 0.5, over_steps: 8}}, non_finite: skip}",
            "config.ema={decays: [0.9]}",
        ),
    ),
    "muon": Feature(GPT, (CUT, "config.optimizer.name=muon")),
    "normuon": Feature(GPT, (CUT, "config.optimizer.name=normuon", "config.optimizer.moments=bfloat16")),
    "muonh": Feature(GPT, (CUT, "config.optimizer.name=muonh")),
    "galore": Feature(
        GPT,
        (CUT, "config.optimizer={name: galore, learning_rate: 0.001, rank: 8, projection_every_steps: 7}"),
    ),
    "schedule_free": Feature(
        GPT,
        (
            CUT,
            "config.optimizer={name: schedule_free_adamw, learning_rate: 0.001}",
            "config.schedule={name: constant, warmup_share: 0.1}",
        ),
    ),
    "groups": Feature(
        GPT,
        (
            CUT,
            "config.optimizer.groups=[{pattern: '*embedding', frozen: true}, "
            "{pattern: '*bias', rate: 0.5, clip_norm: 0.1}]",
            "config.optimizer.moments=bfloat16",
        ),
    ),
    "adapter": Feature(
        GPT,
        (
            f"checkpoint.init_from={BASE}",
            "config.adapter={rank: 4, targets: [blocks.query, blocks.value]}",
            "config.ema={decays: [0.9], evaluate: true}",
        ),
    ),
    "int8": Feature(
        GPT,
        (
            f"checkpoint.init_from={BASE}",
            "config.adapter={rank: 4, targets: [blocks.query, blocks.mlp_in]}",
            "config.ema={decays: [0.9], evaluate: true}",
            "config.precision={compute: bfloat16, matmul: int8, gradient_rounding: stochastic}",
        ),
    ),
    "float8": Feature(LLAMA, (CUT, "config.precision={matmul: float8, gradient_rounding: stochastic}")),
    "experts in int8": Feature(
        EXPERTS, ("config.precision={compute: bfloat16, matmul: int8, gradient_rounding: stochastic}",)
    ),
    "experts in float8": Feature(EXPERTS, ("config.precision.matmul=float8", "config.model.moe.capacity_factor=1.5")),
    "judged": Feature(
        GPT,
        (
            "config.eval.samples={prompts: ['def ', 'class '], tokens: 12, temperature: 0.8, every_steps: 20}",
            "config.eval.bits_per_byte=true",
            "config.metrics.norms=groups",
        ),
    ),
    # Kills of two processes come at the saves around the borders.
    "stages": Feature(
        LLAMA,
        (
            "config.schedule={name: wsd, warmup_steps: 10, decay_steps: 20}",
            "config.ema={decays: [0.9]}",
            "config.stages=[{from_step: 7, set: {data.mixture: [{name: one, source: python-stdlib, weight: 3}, "
            "{name: two, source: python-stdlib}], ema.decays: [0.99]}}, "
            "{from_step: 30, set: {train.global_batch_examples: 16, data.sequence_length: 64, "
            "model.rope.theta: 2.0e4}}, "
            "{from_tokens: 66000, set: {schedule: {name: linear}, optimizer.weight_decay: 0.2}, why: anneal}]",
        ),
    ),
    "replay": Feature(GPT, ("topology.mesh={data: auto}", "config.train.replay_every_steps=5"), devices=(4, 2)),
    "arrays": Feature("specs/vit_nano.yaml", (CUT, "config.data.sequence_length=null", "config.ema={decays: [0.9]}")),
    "noise": Feature(GPT, (CUT, "config.model.neftune_alpha=5.0", "config.model.dropout=0.1")),
}
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = Job(GPT, tmp_path_factory.mktemp("base") / "run", (*NANO, "seed=3"))
    job.finish()
    return str(job.directory / CHECKPOINTS / "120")


@pytest.fixture(params=FEATURES)
def feature(request: pytest.FixtureRequest) -> Feature:
    """Return a feature of a run, as spec, options and devices."""
    found = FEATURES[request.param]
    options = found.options
    if any(BASE in option for option in options):
        options = tuple(option.replace(BASE, request.getfixturevalue("base")) for option in options)
    return found._replace(options=(*NANO, *options))


def test_kills_in_every_phase_change_no_bit_and_no_row(feature, tmp_path):
    spec, options, (devices, _) = feature
    job = Job(spec, tmp_path / "run", options, devices)
    storm(job, 7, seed=6, delays=TRAINER_DELAYS)
    kill_before_done(job, 120)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == make_uninterrupted_run(spec, options, devices).outcome()


def test_kills_and_a_stop_of_two_processes_change_no_bit_and_no_row(feature, tmp_path):
    spec, options, (_, devices) = feature
    job = Job(spec, tmp_path / "run", options, devices)
    for step, number in ((6, signal.SIGKILL), (30, signal.SIGTERM), (72, signal.SIGKILL)):
        attempt = job.launch(2)
        attempt.wait_until(lambda step=step: any(committed >= step for committed in job.committed()), f"step {step}")
        if number == signal.SIGKILL:
            attempt.kill_tree()
        else:
            attempt.process.send_signal(number)
            attempt.expect(75)
    job.launch(2).expect(0)
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == make_uninterrupted_run(spec, options, devices, num_processes=2).outcome()
