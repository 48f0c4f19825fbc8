"""Token files that change while a job trains: exit code 2, and no state with steps on the changed data is saved."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.job_process import SMALL_GPT_OPTIONS, Job, link_peers, make_uninterrupted_run

SPEC = "specs/gpt_nano.yaml"
OPTIONS = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=50",
    "config.eval.every_steps=50",
    "checkpoint.every_steps=5",
    "logging.every_steps=5",
)
LINE = "tokens.bin: changed since the job started"
# Options by how often a state is saved on the process's own disk.
TIERS = {"durable": (), "fast": ("checkpoint.local_directory={fast}", "checkpoint.local_every_steps=2")}


def make_tokens(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, 50_000, np.uint16).tobytes()


@pytest.mark.parametrize(
    ("tier", "num_processes"),
    [
        ("fast", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("durable", 1), ("durable", 2), ("fast", 1)]),
    ],
)
def test_a_run_whose_data_change_ends_with_2_and_goes_on_with_the_old_data(
    tier: str, num_processes: int, tmp_path: Path
) -> None:
    source, fast = tmp_path / "tokens.bin", tmp_path / "fast"
    source.write_bytes(make_tokens(0))
    options = (*OPTIONS, f"config.data.source={source}", *(each.format(fast=fast) for each in TIERS[tier]))
    job = Job(SPEC, tmp_path / "run", options)
    attempts = job.start_processes(num_processes) if num_processes > 1 else link_peers([job.start()])
    attempts[0].wait_until(lambda: job.newest() >= 5, "step 5")
    for attempt in attempts:
        attempt.freeze()
    # No state whose save began later may be committed. A save that has begun checks the data before or after now.
    newest, begun = job.newest(), max(row["step"] for row in job.events("save", "start") if row["step"] is not None)
    with source.open("r+b") as file:
        file.write(make_tokens(1))
    for attempt in attempts:
        attempt.thaw()
    for attempt in attempts:
        attempt.expect(2)
    assert any(
        LINE in attempt.output and "since the last commit are not saved" in attempt.output for attempt in attempts
    )
    assert not any("Traceback" in attempt.output for attempt in attempts)
    assert job.newest() in (newest, begun)
    for process in range(num_processes) if tier == "fast" else ():
        parts = [
            int(path.name) for path in next(fast.iterdir()).joinpath(str(process)).iterdir() if path.name.isdecimal()
        ]
        assert all(step <= begun for step in parts), parts
    # The next start finds the change too. With the former file the run is the one that was not disturbed.
    job.start().expect(2)
    source.write_bytes(make_tokens(0))
    finished = job.launch(num_processes) if num_processes > 1 else job.start()
    finished.expect(0)
    plain = (*OPTIONS, f"config.data.source={source}")
    assert job.outcome() == make_uninterrupted_run(SPEC, plain, num_processes=num_processes).outcome()
