"""Sweeps as an array job of SLURM and as JobSets: what is submitted, and what is not.

The files in tests/golden are written with `python -m launch sweep` and the words of GOLDEN.
"""

import json
import os
from pathlib import Path

import pytest
import yaml

from launch.app import main

ROOT = Path(__file__).parents[3]
GOLDEN = {
    "slurm_sweep.sh": (
        "specs/gpt_nano.yaml --root /data/sweep --grid seed=0,1,2 --at-once 2 --engine slurm --skip-checks --dry-run -- "
        "--nodes 2 --cpus-per-task 4 --python /opt/env/bin/python"
    ),
    "jobset_sweep.yaml": (
        "tests/golden/job.yaml --root /data/sweep --grid seed=0,1 --engine jobset --skip-checks --dry-run -- "
        "--image registry/job:1 --nodes 1 --volume-claim data=/data --label kueue.x-k8s.io/queue-name=lab"
    ),
}
FAKE = """#!/bin/bash
case $0 in
  */sbatch) cat > {directory}/script; echo 77 ;;
  */squeue) cat {directory}/queue 2>/dev/null || true ;;
  */kubectl) [[ $1 != apply ]] || cat > {directory}/manifest ;;
esac
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Put programs on the PATH that record what they get; return their directory."""
    monkeypatch.chdir(ROOT)
    for name in ("sbatch", "squeue", "kubectl"):
        (tmp_path / name).write_text(FAKE.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("name", GOLDEN)
def test_what_would_be_submitted_equals_the_golden_file(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["sweep", *GOLDEN[name].split()]) == 0
    assert capsys.readouterr().out == (ROOT / "tests" / "golden" / name).read_text()
    assert not Path("/data/sweep").exists()


def test_only_runs_that_are_not_in_the_queue_are_submitted(fakes, tmp_path, capsys):
    root = tmp_path / "root"
    words = ["sweep", "specs/counter.yaml", "--root", str(root), "--grid", "seed=0,1,2", "--engine", "slurm"]
    words.append("--skip-checks")
    assert main(words) == 0
    assert "3 runs submitted as array job 77" in capsys.readouterr().out
    script = (fakes / "script").read_text()
    assert "#SBATCH --array=0,1,2\n" in script
    assert json.loads((root / "sweep.json").read_text())["submitted"] == {"000": "77_0", "001": "77_1", "002": "77_2"}
    comment = next(line.partition("--comment=")[2] for line in script.splitlines() if "--comment=" in line)
    # As after a kill before the ids were recorded: the queue knows them by the comment.
    (fakes / "queue").write_text(f"77_0 {comment}\n77_2 {comment}\n77_1 another\n99 (null)\n")
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "000: is in the queue as 77_0" in output
    assert "#SBATCH --array=1\n" in (fakes / "script").read_text()
    (fakes / "queue").write_text("".join(f"77_{n} {comment}\n" for n in range(3)))
    (fakes / "script").unlink()
    assert main(words) == 0
    assert not (fakes / "script").exists()


def test_one_call_of_kubectl_gets_a_jobset_for_each_run(fakes, tmp_path):
    words = ["sweep", "tests/golden/job.yaml", "--root", str(tmp_path / "root"), "--grid", "seed=0,1", "--skip-checks"]
    words += ["--engine", "jobset", "--", "--image", "a:1", "--nodes", "1", "--volume-claim", f"data={tmp_path}"]
    assert main(words) == 0
    documents = [*yaml.safe_load_all((fakes / "manifest").read_text())]
    assert [each["metadata"]["name"] for each in documents] == ["tiny-gpt-000", "tiny-gpt-001"]
