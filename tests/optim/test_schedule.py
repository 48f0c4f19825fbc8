"""Schedules by name: each against its formula in plain Python and values computed by hand."""

import math
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from runner.errors import InvalidError
from runner.optim.config import SCHEDULES, ScheduleConfig
from runner.optim.library import make_schedule
from runner.train.optimizer import (
    COMPARED_STEPS_MAX,
    ScheduleStage,
    StageRates,
    find_first_other_rate,
    make_stage_rates,
    make_stage_schedules,
)
from runner.train.optimizer import compute_rates as compute_run_rates
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


# Comparison of two runs.


def draw_stages(rng: random.Random) -> list[ScheduleStage]:
    """Return the learning rates of a random run of up to four stages."""
    total = rng.randrange(6, 300)
    starts = [0, *sorted(rng.sample(range(1, total), rng.randrange(4)))]
    stages = []
    for start in starts:
        rest = total - start
        begins = start == 0 or rng.random() < 0.5
        name = rng.choice([*SCHEDULES])
        config: dict[str, Any] = {"name": name, "warmup_steps": min(rng.choice([0, 1, 3, 20]), rest - 1)}
        config |= {"final_learning_rate": rng.choice([0.0, 1e-4])} if name != "constant" else {}
        if name == "inverse_square_root":
            config["warmup_steps"] = max(config["warmup_steps"], 1)
            begins &= rest > 1
        config |= {"wsd": {"decay_steps": min(rng.choice([1, 5, 40]), rest - config["warmup_steps"])}}.get(name, {})
        config |= {"polynomial": {"power": 2.0}, "cosine_restarts": {"cycles": rng.choice([1, 2, 5])}}.get(name, {})
        peak = rng.choice([1e-3, 2e-3]) if start == 0 or rng.random() < 0.5 else None
        stages.append(ScheduleStage(start, begins, ScheduleConfig.model_validate(config), peak, total))
    return stages


def change_stages(rng: random.Random, stages: list[ScheduleStage]) -> list[ScheduleStage]:
    """Return the same run with another total, another end of its stages, or nothing changed."""
    total = stages[0].total_steps
    longer = rng.choice([0, 0, 1, 10, 400])
    kept = stages[: rng.randrange(1, len(stages) + 1)] if rng.random() < 0.5 else stages
    added = draw_stages(rng)[1:] if rng.random() < 0.3 else []
    whole = [*kept, *(stage for stage in added if kept[-1].start < stage.start < total)]
    changed = [replace(stage, total_steps=total + longer) for stage in whole]
    return [
        replace(stage, schedule=stage.schedule.model_copy(update={"decay_steps": 1}))
        if stage.schedule.name == "wsd" and rng.random() < 0.3
        else stage
        for stage in changed
    ]


def find_by_evaluating_all(first: list[ScheduleStage], second: list[ScheduleStage], end: int) -> int | None:
    """Return the first step below `end` with different rates, from the rates of all steps."""
    steps = np.arange(end, dtype=np.int32)
    rates = [
        compute_run_rates(make_stage_schedules(stages), [stage.start for stage in stages], steps)
        for stages in (first, second)
    ]
    found = np.flatnonzero(rates[0] != rates[1])
    return int(found[0]) if len(found) else None


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 250))])
def test_pieces_differ_where_the_rates_of_all_steps_differ(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        first = draw_stages(rng)
        second = change_stages(rng, first) if rng.random() < 0.8 else draw_stages(rng)
        try:
            rates = [make_stage_rates(stages) for stages in (first, second)]
        except InvalidError:  # a stage begins where the rate is 0
            continue
        break
    end = max(stages[0].total_steps for stages in (first, second))
    assert find_first_other_rate(*rates, end) == find_by_evaluating_all(first, second, end)


BILLION = 10**9


def make_rates(total: int, *, peak: float = 1e-3, **config: Any) -> list[StageRates]:
    return make_stage_rates([ScheduleStage(0, True, ScheduleConfig.model_validate(config), peak, total)])


LONG: dict[str, tuple[list[StageRates], list[StageRates], int | None]] = {
    "equal": (make_rates(BILLION, name="cosine"), make_rates(BILLION, name="cosine"), None),
    "longer constant": (make_rates(13, name="constant"), make_rates(BILLION, name="constant"), None),
    "longer wsd": (
        make_rates(BILLION, name="wsd", decay_steps=10),
        make_rates(2 * BILLION, name="wsd", decay_steps=10),
        BILLION - 9,
    ),
    "shorter wsd": (
        make_rates(BILLION, name="wsd", decay_steps=10),
        make_rates(1000, name="wsd", decay_steps=10),
        991,
    ),
    "longer square root": (
        make_rates(100, name="inverse_square_root", warmup_steps=10),
        make_rates(BILLION, name="inverse_square_root", warmup_steps=10),
        None,
    ),
    "another rate after a long warm-up": (
        make_rates(BILLION, name="constant", warmup_steps=BILLION // 2),
        make_rates(BILLION, name="constant", warmup_steps=BILLION // 2, peak=2e-3),
        15,  # the rates of the steps before are 0 in float32
    ),
    "restarts": (
        make_rates(BILLION, name="cosine_restarts", cycles=2),
        make_rates(BILLION, name="cosine_restarts", cycles=2),
        None,
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_a_total_without_end_is_compared_by_pieces(case: str) -> None:
    first, second, expected = LONG[case]
    tracemalloc.start()
    try:
        assert find_first_other_rate(first, second, 2 * BILLION) == expected
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


def test_pieces_that_never_seem_to_differ_count_as_different_after_the_compared_steps() -> None:
    # Both are constant in float32 for longer than any comparison takes.
    flat = [make_rates(BILLION, name="polynomial", power=power, final_learning_rate=1e-4) for power in (1e-9, 2e-9)]
    assert find_first_other_rate(*flat, BILLION) == COMPARED_STEPS_MAX
    assert find_first_other_rate(*flat, 100) is None
