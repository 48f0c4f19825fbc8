"""Schedules by name: each against its formula in plain Python and values computed by hand."""

import math

import pytest
from pydantic import ValidationError

from runner.errors import InvalidError
from runner.optim.config import SCHEDULES, ScheduleConfig
from runner.optim.library import make_schedule
from tests.support.tiny_jobs import make_gpt
from tests.test_values import TrainLookup

PEAK, FINAL, TOTAL = 0.3, 0.02, 400
WARMUP, DECAY, POWER, CYCLES = 40, 90, 1.5, 3
KEYS = {"wsd": {"decay_steps": DECAY}, "polynomial": {"power": POWER}, "cosine_restarts": {"cycles": CYCLES}}
STEPS = (40, 41, 77, 120, 160, 199, 281, 311, 399, 400)


def compute_warmup_share(step):
    return min((step - WARMUP) / (TOTAL - WARMUP), 1.0)


def compute_half_cosine(u):
    return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * u)) / 2


FORMULAS = {
    "constant": lambda step: PEAK,
    "linear": lambda step: PEAK + (FINAL - PEAK) * compute_warmup_share(step),
    "cosine": lambda step: compute_half_cosine(compute_warmup_share(step)),
    "cosine_restarts": lambda step: (
        FINAL if step >= TOTAL else compute_half_cosine(CYCLES * (step - WARMUP) % (TOTAL - WARMUP) / (TOTAL - WARMUP))
    ),
    "polynomial": lambda step: FINAL + (PEAK - FINAL) * (1 - compute_warmup_share(step)) ** POWER,
    "wsd": lambda step: PEAK + (FINAL - PEAK) * max(0.0, step - (TOTAL - DECAY)) / DECAY,
    "inverse_square_root": lambda step: PEAK * math.sqrt(WARMUP / step),
}


def compute_rates(name, steps, peak=1.0, total=100, **config):
    schedule = make_schedule(name, ScheduleConfig(name=name, **config), peak, total)
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_matches_its_formula(name):
    config = {"final_learning_rate": FINAL} if "final_learning_rate" in SCHEDULES[name].defaults else {}
    actual = compute_rates(name, STEPS, PEAK, TOTAL, warmup_steps=WARMUP, **config, **KEYS.get(name, {}))
    assert actual == pytest.approx([FORMULAS[name](step) for step in STEPS], rel=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_linearly_from_zero(name):
    expected = pytest.approx([0, 0.1, 0.5, 0.9, 1.0])
    for warmup in ({"warmup_steps": 10}, {"warmup_share": 0.1}):
        assert compute_rates(name, [0, 1, 5, 9, 10], **warmup, **KEYS.get(name, {})) == expected


def test_constant_is_constant():
    assert compute_rates("constant", [0, 50, 100]) == [1.0] * 3


def test_linear_decays_linearly():
    assert compute_rates("linear", [0, 25, 50, 100], final_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.2])


def test_cosine_decays_along_a_half_cosine():
    halfway, quarter = 0.55, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    actual = compute_rates("cosine", [20, 40, 60, 100], warmup_steps=20, final_learning_rate=0.1)
    assert actual == pytest.approx([1.0, quarter, halfway, 0.1])


def test_cosine_restarts_at_its_peak():
    assert compute_rates("cosine_restarts", [0, 25, 50, 75, 100], cycles=2) == pytest.approx([1.0, 0.5, 1.0, 0.5, 0.0])


def test_wsd_is_constant_until_its_decay():
    config = {"warmup_steps": 10, "decay_steps": 20, "final_learning_rate": 0.1}
    actual = compute_rates("wsd", [10, 50, 79, 80, 90, 100], **config)
    assert actual == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.55, 0.1])


def test_inverse_square_root_halves_after_four_warm_ups():
    for total in (50, 1000):
        assert compute_rates("inverse_square_root", [10, 40, 90], total=total, warmup_steps=10) == pytest.approx(
            [1.0, 1 / 2, 1 / 3]
        )


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "final_learning_rate" in SCHEDULES[name].defaults])
def test_schedules_keep_their_final_rate(name):
    config = {"final_learning_rate": 0.2, "decay_steps": 10 if name == "wsd" else None}
    assert compute_rates(name, [100, 101, 1000], **config) == pytest.approx([0.2] * 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "inverse_square_root"}, "missing key warmup_steps .or warmup_share."),
        ({"warmup_steps": 3, "warmup_share": 0.1}, "got both warmup_steps=3 and warmup_share=0.1; keep one"),
        ({"warmup_share": 1.0}, "less than 1"),
    ],
)
def test_an_invalid_warm_up_is_rejected(config, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig(**config)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_named_by_the_job_reads_the_keys_of_the_spec(name, tmp_path):
    class Naming(TrainLookup):
        @classmethod
        def schedule(cls):
            return name

    def problems(**config):
        changes = {"config.schedule": config, "config.train.total_steps": TOTAL, "config.optimizer.learning_rate": 0.1}
        return make_gpt(tmp_path / "run", Naming, **changes).setup_builder

    own = KEYS.get(name, {}) | {"warmup_steps": WARMUP}
    own |= {"final_learning_rate": FINAL} if "final_learning_rate" in SCHEDULES[name].defaults else {}
    builder = problems(**own)
    builder.validate_keys_read()
    schedule = builder.optimizer_choice.build_schedule(builder.config)
    assert float(schedule(350)) == pytest.approx(compute_rates(name, [350], 0.1, TOTAL, **own)[0])
    needed = {"wsd": "decay_steps", "inverse_square_root": "warmup_steps"}.get(name)
    if needed is not None:
        with pytest.raises(InvalidError, match=rf"config.schedule: missing key {needed}, which {name} of schedule"):
            problems(**{key: value for key, value in own.items() if key != needed}).validate_keys_read()
    if name != "wsd":
        with pytest.raises(InvalidError, match=f"decay_steps: .*{name} does not read it, wsd would"):
            problems(**own, decay_steps=5).validate_keys_read()
