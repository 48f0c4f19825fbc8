"""The data section of a plan: reachability of each source, and its tokens compared with the budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.corpus_index import HEAD_BYTES
from runner.plan.checks import DataCheck, Findings, check_data
from tests.data.buckets import URL, make_random_shards, put_in_bucket, write_corpus
from tests.data.datasets import write_bin
from tests.support.tiny_jobs import make_gpt


def run_check(tmp_path: Path, findings: Findings | None = None, num_hosts: int = 1, **data: Any) -> DataCheck:
    job = make_gpt(
        tmp_path / "run",
        **{"config.data": {"sequence_length": 16, **data}, "config.model.vocabulary_size": 4096},
    )
    return check_data(job, findings or Findings(), num_hosts)


def list_figures(found: DataCheck) -> dict[str, Any]:
    return {figure.name: figure.value for figure in found.section.figures}


def mixture(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    sizes = {"web": 4000, "code": 1000}
    paths = {name: write_bin(tmp_path / f"{name}.bin", np.arange(size) % 4000) for name, size in sizes.items()}
    return [
        {"name": "web", "source": str(paths["web"]), "weight": 3},
        {"name": "code", "source": str(paths["code"]), "weight": 1, **changes},
    ]


def test_each_source_of_a_mixture_is_listed_with_its_epochs(tmp_path: Path) -> None:
    found = list_figures(
        run_check(tmp_path, mixture=mixture(tmp_path), validation={"other": str(tmp_path / "web.bin")})
    )
    assert found["source of web"] == str(tmp_path / "web.bin")
    assert (found["training tokens of web"], found["training tokens of code"]) == (3800, 950)
    examples = 8 * 16
    assert found["epochs of web"] == pytest.approx(examples * 0.75 / (3799 // 16))
    assert found["epochs of code"] == pytest.approx(examples * 0.25 / (949 // 16))
    assert found["validation examples of other"] == 3999 // 16
    assert found["first batch"] > 0


def test_a_source_with_too_many_epochs_is_a_problem(tmp_path: Path) -> None:
    findings = Findings()
    found = run_check(tmp_path, findings, mixture=mixture(tmp_path, max_epochs=0.5))
    assert not found.is_found
    (problem,) = findings.problems
    assert "config.data.mixture: code=" in problem
    assert "max_epochs=0.5" in problem


def test_the_bytes_fetched_from_a_bucket_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    driver = put_in_bucket(monkeypatch, write_corpus(tmp_path / "corpus", make_random_shards([[500] * 20])))
    found = run_check(tmp_path, num_hosts=4, source=URL)
    assert list_figures(found)["fetched from buckets"] == 8 * 16 * 17 * 2
    before = driver.bytes_fetched
    run_check(tmp_path, num_hosts=4, source=URL)
    assert driver.bytes_fetched - before == HEAD_BYTES + 1, (
        "sequences come from the cache, but the listing is read again"
    )


def test_an_unreachable_source_is_a_problem(tmp_path: Path) -> None:
    findings = Findings()
    assert not run_check(tmp_path, findings, source=str(tmp_path / "nowhere.bin")).is_found
    assert len(findings.problems) == 1
