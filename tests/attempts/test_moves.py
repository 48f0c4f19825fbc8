"""Moved data and renamed classes: a run continues if their content is the same, and not otherwise."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.counter import Counter
from experiments.gpt import PretrainGPT
from runner.attempts.fence import RunIdentity
from runner.config import DataConfig
from runner.errors import InvalidError, ResumeError
from runner.hook.hooks import Hook, HookConfig
from runner.hook.listing import ListedHook
from runner.spec import HookEntry, compute_trajectory, make_document
from runner.storage import LocalStore, read_log
from tests.data.buckets import URL, put_in_bucket
from tests.data.datasets import write_bin, write_npy
from tests.support.tiny_jobs import get_job_name, make_counter, make_gpt, make_gpt_spec, read_outcome, stop_after
from tests.support.tokenise_inputs import (
    DOCUMENTS,
    make_tokenise_job,
    make_tokenizer_files,
    read_corpus_files,
    write_text_files,
)

SAME, OTHER = "same", "other"


@pytest.fixture(autouse=True)
def run_in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in `tmp_path`, because `make_gpt_spec` writes a text beside the run."""
    monkeypatch.chdir(tmp_path)


def validate(saved: dict[str, Any], present: dict[str, Any], content: str = SAME) -> RunIdentity:
    """Compare two specs whose data have the fingerprints `same` and `content`."""

    def identify(data: dict[str, Any], fingerprint: str) -> RunIdentity:
        spec = make_gpt_spec(Path("run"), **{"config.data": {"sequence_length": 16} | data})
        config = PretrainGPT.Config.model_validate(spec.config)
        identity = compute_trajectory(spec, config) | {"config.data": fingerprint}
        return RunIdentity(make_document(spec), config, identity, ())

    found = identify(present, content)
    found.validate_trajectory(identify(saved, SAME).identity, "checkpoint 4", "run", lambda: 4)
    return found


def make_mixture(*sources: str, **changes: Any) -> dict[str, Any]:
    named = [{"name": f"s{i}", "source": source} for i, source in enumerate(sources)]
    return {"mixture": [named[0] | changes, *named[1:]]}


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "path": ({"source": "/a/x.bin"}, {"source": "/b/y.bin"}),
    "to_a_bucket": ({"source": "/a/x.bin"}, {"source": "gs://bucket/x.bin"}),
    "between_buckets": ({"source": "s3://a/web"}, {"source": "az://b/web"}),
    "class": ({"source": "mine.data:Web"}, {"source": "mine.corpora.web:Web"}),
    "path_of_a_class": (
        {"source": "mine:Web", "options": {"path": "/a/x", "seed": 1}},
        {"source": "mine:Web", "options": {"path": "s3://b/x", "seed": 1}},
    ),
    "mixture": (make_mixture("/a/x.bin", "/a/y.bin"), make_mixture("/a/x.bin", "/b/y.bin")),
    "header": ({"source": "/a/x.bin", "dtype": "uint32"}, {"source": "/a/x.npy"}),
}
CHANGED_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed_of_a_class": (
        {"source": "mine:Web", "options": {"path": "/a/x", "seed": 1}},
        {"source": "mine:Web", "options": {"path": "/a/x", "seed": 2}},
        "options.seed",
    ),
    "length": ({"source": "/a/x.bin"}, {"source": "/b/x.bin", "sequence_length": 32}, "sequence_length"),
    "weight": (make_mixture("/a/x.bin"), make_mixture("/b/x.bin", weight=2), "weight"),
    "train_on": ({"source": "/a"}, {"source": "/b", "train_on": "all"}, "train_on"),
    "one_source_more": (make_mixture("/a/x.bin"), make_mixture("/a/x.bin", "/a/y.bin"), r"mixture\.1\.name"),
}


@pytest.mark.parametrize("kind", MOVES)
def test_moved_data_are_recognised_by_their_fingerprint(kind: str) -> None:
    saved, present = MOVES[kind]
    validate(saved, present)
    with pytest.raises(ResumeError, match=r"config\.data: checkpoint 4 has 'same', the spec 'other'"):
        validate(saved, present, OTHER)


@pytest.mark.parametrize("kind", CHANGED_KEYS)
def test_keys_that_change_batches_are_compared_for_moved_data(kind: str) -> None:
    saved, present, key = CHANGED_KEYS[kind]
    with pytest.raises(ResumeError, match=key):
        validate(saved, present)


def test_a_move_is_reported_with_key_and_paths() -> None:
    saved, present = ({"source": f"/{place}/x.bin"} for place in "ab")
    found = validate(saved, present)
    assert found.list_moves(validate(saved, saved).identity) == ["config.data.source: /a/x.bin -> /b/x.bin"]
    assert found.list_moves(found.identity) == []
    assert found.is_continued(validate(saved, saved).identity, 4)
    assert not found.is_continued(found.identity | {"seed": 77}, 4)


@pytest.mark.soak
def test_a_run_continues_after_moving_its_data_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 60, 3000)

    def job(directory: str, source: str) -> Any:
        return make_gpt(tmp_path / directory, **{"config.data": {"source": source, "sequence_length": 16}})

    old, new = (write_bin(tmp_path / place / "x.bin", ids) for place in ("old", "new"))
    job("whole", str(old))()
    stop_after(job("run", str(old)), 2)
    old.unlink()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    other = write_bin(tmp_path / "other.bin", ids[::-1])
    with pytest.raises(InvalidError, match=r"config\.data: checkpoint 2 has"):
        job("elsewhere", str(other))()
    stop_after(job("elsewhere", str(new)), 5)
    put_in_bucket(monkeypatch, tmp_path / "new")
    job("elsewhere", f"{URL}/x.bin")()
    assert read_outcome(tmp_path / "elsewhere") == read_outcome(tmp_path / "whole")
    events = read_log(LocalStore(tmp_path / "elsewhere"), "events")
    moved = [(event["step"], event["changes"]) for event in events if event["event"] == "moved"]
    assert moved == [
        (2, [f"config.data.source: {old} -> {new}"]),
        (5, [f"config.data.source: {new} -> {URL}/x.bin"]),
    ]


@pytest.mark.soak
def test_initial_weights_can_be_moved_or_deleted_after_the_start(tmp_path: Path) -> None:
    make_gpt(tmp_path / "base", **{"config.train.total_steps": 3})()
    for name in ("run", "whole"):
        job = make_gpt(tmp_path / name, **{"checkpoint.init_from": str(tmp_path / "base")})
        if name == "whole":
            job()
        else:
            stop_after(job, 2)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    stop_after(make_gpt(tmp_path / "run", **{"checkpoint.init_from": str(tmp_path / "moved")}), 4)
    shutil.rmtree(tmp_path / "moved")
    make_gpt(tmp_path / "run", **{"checkpoint.init_from": str(tmp_path / "base")})()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
def test_the_fast_tier_is_used_after_a_move(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 60, 3000)
    places = [write_bin(tmp_path / place / "x.bin", ids) for place in ("old", "new")]
    fast = {"checkpoint.local_directory": str(tmp_path / "fast"), "checkpoint.local_every_steps": 1}

    def job(source: Path) -> Any:
        return make_gpt(tmp_path / "run", **fast, **{"config.data": {"source": str(source), "sequence_length": 16}})

    stop_after(job(places[0]), 3)
    shutil.rmtree(tmp_path / "old")
    job(places[1])()
    restored = [event for event in read_log(LocalStore(tmp_path / "run"), "events") if event["event"] == "restore"]
    assert [(event["step"], event["tier"]) for event in restored] == [(3, "fast")]


class RenamedCounter(Counter):
    former_paths = ("lost.module:Counter", "experiments.counter:Counter")


class DerivedCounter(RenamedCounter):
    pass


class OtherCounter(Counter):
    pass


class MistakenCounter(Counter):
    former_paths = "experiments.counter:Counter"  # type: ignore[assignment]


def test_a_renamed_class_continues_and_another_class_is_rejected(tmp_path: Path) -> None:
    stop_after(make_counter(tmp_path), 10)
    for other in (OtherCounter, DerivedCounter):
        with pytest.raises(InvalidError, match=r"job: .* has 'experiments.counter:Counter'.* former_paths"):
            make_counter(tmp_path, other, job=get_job_name(other))()
    with pytest.raises(InvalidError, match=r"job: MistakenCounter\.former_paths"):
        make_counter(tmp_path, MistakenCounter, job=get_job_name(MistakenCounter))()
    job = make_counter(tmp_path, RenamedCounter, job=get_job_name(RenamedCounter))
    job()
    assert job.step == 40
    events = read_log(LocalStore(tmp_path), "events")
    (moved,) = [event for event in events if event["event"] == "moved"]
    assert moved["changes"] == [f"job: experiments.counter:Counter -> {get_job_name(RenamedCounter)}"]


class RenamedGPT(PretrainGPT):
    former_paths = ("experiments.gpt:PretrainGPT",)


def test_former_paths_are_not_inherited_from_the_base(tmp_path: Path) -> None:
    class Derived(RenamedGPT):
        pass

    assert make_gpt(tmp_path, RenamedGPT).former_values["job"] == RenamedGPT.former_paths
    assert make_gpt(tmp_path, Derived).former_values["job"] == ()


class RenamedHook(Hook):
    former_paths = ("lost.module:Stop",)


def test_a_renamed_hook_is_recognised_as_the_one_that_stopped_the_run() -> None:
    def listed(path: str, hook_class: type[Hook] = RenamedHook) -> ListedHook:
        entry = HookEntry(hook=path, name="stop")
        return ListedHook(hook_class(HookConfig(), None), entry, {})  # type: ignore[arg-type]

    former = listed("lost.module:Stop")
    assert listed("here:RenamedHook").has_digest(former.digest)
    assert not listed("here:RenamedHook").has_digest(listed("else:Where").digest)
    assert not listed("here:RenamedHook", Hook).has_digest(former.digest)


def _make_tokenise_job(tmp_path: Path, run: str, place: str) -> Any:
    """Return a job that tokenises the files in `place` with the tokenizer in it."""
    return make_tokenise_job(
        tmp_path / run,
        **{
            "config.source": f"{tmp_path}/{place}/in/*.txt",
            "config.tokenizer": {"kind": "hf", "file": f"{tmp_path}/{place}/t.json"},
        },
    )


@pytest.fixture
def stopped_job(tmp_path: Path) -> Path:
    """A tokenise job stopped midway, with input and tokenizer in `old`."""
    (tmp_path / "old").mkdir()
    write_text_files(tmp_path / "old/in", DOCUMENTS)
    shutil.copy(make_tokenizer_files(tmp_path / "old")["hf"]["file"], tmp_path / "old/t.json")
    _make_tokenise_job(tmp_path, "whole", "old")()
    stop_after(_make_tokenise_job(tmp_path, "run", "old"), 500)
    return tmp_path


def test_a_tokenise_job_continues_after_moving_input_tokenizer_and_directory(stopped_job: Path) -> None:
    shutil.move(stopped_job / "old", stopped_job / "new")
    shutil.move(stopped_job / "run", stopped_job / "elsewhere")
    made = {path: path.stat().st_mtime_ns for path in (stopped_job / "elsewhere/corpus").glob("0*")}
    job = _make_tokenise_job(stopped_job, "elsewhere", "new")
    stop_after(job, 700)
    shutil.move(stopped_job / "new", stopped_job / "newer")
    _make_tokenise_job(stopped_job, "elsewhere", "newer")()
    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert read_corpus_files(stopped_job / "elsewhere/corpus") == read_corpus_files(stopped_job / "whole/corpus")
    events = read_log(LocalStore(stopped_job / "elsewhere"), "events")
    assert [len(event["changes"]) for event in events if event["event"] == "moved"] == [2, 2]


def test_changed_input_or_tokenizer_at_another_path_is_rejected(stopped_job: Path) -> None:
    shutil.copytree(stopped_job / "old", stopped_job / "new")  # copy modification times too
    first = stopped_job / "new/in/00000.txt"
    status, content = first.stat(), first.read_bytes()
    first.write_bytes(b"another text, of another length")
    with pytest.raises(InvalidError, match=r"old/in/00000\.txt is gone since this job began"):
        _make_tokenise_job(stopped_job, "run", "new")()
    first.write_bytes(content)
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    path = stopped_job / "new/t.json"
    path.write_bytes(path.read_bytes().replace(b"<|pad|>", b"<|PAD|>"))
    with pytest.raises(InvalidError, match=r"config\.tokenizer\.sha256|differs from the one"):
        _make_tokenise_job(stopped_job, "run", "new")()


def test_a_copied_run_does_not_write_to_the_original_corpus(tmp_path: Path) -> None:
    def job(run: str) -> Any:
        source = {"config.source": f"{tmp_path}/in/*.txt", "config.output": f"{tmp_path}/corpus"}
        return make_tokenise_job(tmp_path / run, **source)

    write_text_files(tmp_path / "in", DOCUMENTS)
    stop_after(job("run"), 500)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(InvalidError, match="is the corpus of the run"):
        job("copy")()
    shutil.rmtree(tmp_path / "run")
    job("copy")()
    with pytest.raises(InvalidError, match=r"is the corpus of the run 'tokenise' in .*/copy"):
        job("other")()


def test_the_data_format_can_change_if_the_ids_do_not(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 60, 900).astype("<u2")
    write_bin(tmp_path / "a.bin", ids)
    write_npy(tmp_path / "a.npy", ids, "<u2")
    fingerprints = {
        make_gpt(
            tmp_path / "run", **{"config.data": {"source": f"{tmp_path}/{name}", "sequence_length": 16}}
        ).dataset.fingerprint
        for name in ("a.bin", "a.npy")
    }
    assert len(fingerprints) == 1


def test_content_keys_are_keys_of_the_config() -> None:
    config = PretrainGPT.Config.model_validate(make_gpt_spec(Path("run")).config)
    for key in config.content_keys:
        section, _, name = key.removeprefix("data.").rpartition(".")
        assert section in ("", "mixture")
        assert name in DataConfig.model_fields
