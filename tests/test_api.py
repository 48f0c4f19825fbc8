"""`runner.run` and `runner.open_run`: jobs in the process of a script or a notebook, and runs that are looked at."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runner
from runner.errors import FailedError, InvalidError, SpecError
from runner.history.records import RunState, to_json
from tests.support.job_process import DEADLINE_SECONDS, ROOT, SMALL_GPT_OPTIONS, run_runner
from tests.support.simulated_devices import environment

COUNTER = {
    "name": "count",
    "job": "experiments.counter:Counter",
    "checkpoint": {"every_steps": 10},
    "config": {"total_steps": 40, "width": 64},
}
GPT = {
    **dict(option.split("=", 1) for option in SMALL_GPT_OPTIONS),
    "config.train.total_steps": 4,
    "config.schedule.warmup_steps": 2,
    "config.train.global_batch_examples": 8,
    "config.data.sequence_length": 32,
    "config.eval": {"every_steps": 2, "batches": 2},
    "logging.every_steps": 2,
}


def run_counter(directory: Path, **config: Any) -> dict[str, Any]:
    return runner.run(COUNTER | {"config": COUNTER["config"] | config}, {"directory": str(directory)})  # type: ignore[operator]


@pytest.fixture(autouse=True)
def _disconnect_handlers_of_other_tests() -> Iterator[None]:
    """Keep signals from the threads that commands of other tests have left, which end the process."""
    former = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(former)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt") / "run"
    result = runner.run("specs/gpt_nano.yaml", GPT | {"directory": str(directory)})
    assert result["step"] == 4
    return directory


def test_the_package_lists_what_it_offers() -> None:
    assert dir(runner) == sorted(runner.__all__)
    assert {"run", "open_run", "load_spec", "open_checkpoint", "__version__"} <= set(dir(runner))
    for name in runner.__all__:
        assert getattr(runner, name) is not None
    assert runner.__version__.count(".") == 2


def test_a_run_returns_its_result_and_a_finished_one_returns_it_again(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), sys.argv
    first = run_counter(tmp_path / "run")
    assert first["step"] == 40
    assert run_counter(tmp_path / "run") == first
    assert (signal.getsignal(signal.SIGINT), sys.argv) == before
    assert run_counter(tmp_path / "run", total_steps=50)["step"] == 50


def test_a_spec_is_a_file_or_a_mapping_with_values_that_replace_its_own(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: a\njob: experiments.counter:Counter\ndirectory: runs/a\n")
    assert runner.load_spec(path).name == runner.load_spec(str(path)).name == "a"
    changed = runner.load_spec(path, {"name": "b", "group": "c: d", "checkpoint.keep_last": 7, "hooks": []})
    assert (changed.name, changed.group, changed.checkpoint.keep_last) == ("b", "c: d", 7)
    with pytest.raises(SpecError, match=r"checkpoint\.keep_lost.*did you mean checkpoint\.keep_last"):
        runner.load_spec(path, {"checkpoint.keep_lost": 7})
    with pytest.raises(SpecError, match="jobb"):
        runner.run({"name": "a", "jobb": "x"})


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_an_interrupt_saves_the_state_and_the_next_call_goes_on(where: str, tmp_path: Path) -> None:
    undisturbed = run_counter(tmp_path / "undisturbed")

    def interrupt() -> None:
        while not (tmp_path / "run" / "checkpoints" / "10" / "manifest.json").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    former = signal.getsignal(signal.SIGINT)
    if where == "main thread":
        threading.Thread(target=interrupt).start()
        with pytest.raises(runner.PreemptedError, match="is saved"):
            run_counter(tmp_path / "run", step_seconds=0.02)
        assert 10 < runner.open_run(tmp_path / "run").checkpoints[-1] < 40
    else:  # where no handler can be installed, and none is
        thread = threading.Thread(target=run_counter, args=(tmp_path / "run",))
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is former
    assert run_counter(tmp_path / "run") == undisturbed


def test_an_interrupt_before_the_first_step_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("experiments.counter.Counter.init_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_counter(tmp_path / "run")
    monkeypatch.undo()
    assert run_counter(tmp_path / "run")["step"] == 40


def test_a_job_that_hangs_is_reported_and_the_process_goes_on(tmp_path: Path, capsys: Any) -> None:
    document = COUNTER | {"config": {"total_steps": 2, "step_seconds": 4}, "deadlines": {"step_seconds": 1}}
    assert runner.run(document, {"directory": str(tmp_path / "run")})["step"] == 2
    assert "the job cannot continue" in capsys.readouterr().err


def test_an_exit_of_the_jobs_own_code_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.counter.Counter.init_state", lambda *_: sys.exit(0))
    with pytest.raises(FailedError, match=r"exit"):
        run_counter(tmp_path / "run")


def test_a_run_is_looked_at(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner.open_run(gpt)
    assert run.checkpoints == [4]
    assert run.spec.name == "gpt_nano"
    status = run.status()
    assert (status.state, status.step) == (RunState.DONE, 4)
    assert to_json(status)["step"] == 4
    monkeypatch.setitem(sys.modules, "pandas", None)
    metrics = run.metrics()
    np.testing.assert_array_equal(metrics["step"], [2, 4])
    assert metrics["train/loss"].dtype == np.float64
    assert metrics["val/loss"][-1] == status.row["val/loss"]


def test_a_loaded_model_predicts_what_is_sampled(gpt: Path) -> None:
    run = runner.open_run(str(gpt))
    loaded = run.load()
    assert loaded.step == 4
    ids = loaded.tokenizer.encode("def main():")
    logits = loaded.model.apply(loaded.variables, ids[None].astype(np.int32), deterministic=True)
    assert logits.shape == (1, len(ids), 256)
    most_probable = loaded.tokenizer.decode([int(logits[0, -1].argmax())])
    assert run.sample("def main():", 1, temperature=0).rstrip("\n") == f"def main():{most_probable}".rstrip("\n")
    assert run.sample("def ", 8, seed=1).startswith("def ")
    code, output = run_runner(environment(1), "sample", str(gpt), "--prompt", "def ", "--tokens", "8", "--seed", "1")
    assert code == 0
    # The command escapes control characters.
    printed = re.sub(r"\\u[0-9a-f]{4}|\n", "", output)
    assert printed.endswith(re.sub(r"[\x00-\x1f]", "", run.sample("def ", 8, seed=1)))
    with pytest.raises(InvalidError, match=r"got step 3, has 4"):
        run.load(3)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="holds no run"):
        runner.open_run(tmp_path)


def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "experiments" / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept in the repository"
    program = "\n".join(cells).replace("runs/first_steps", str(tmp_path / "run"))
    variables = environment(1) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "done at step 60 with checkpoints [20, 40, 60]" in done.stdout
    assert "\ndef " in done.stdout
    assert "60 (1, 17, 256)" in done.stdout
    assert "config.stages" in done.stdout.splitlines()[-1], "the cosine of a longer run is another one"
