"""Profiles of steps chosen by the spec or on request; they leave training unchanged, and a failure is a warning."""

import gzip
import json
import threading
from pathlib import Path

import jax
import pytest

from experiments.gpt import PretrainGPT
from runner.cli.app import run_command
from runner.errors import InvalidError, SpecError
from runner.spec import MAX_PROFILE_STEPS, parse_document, validate_spec
from runner.storage import JsonObject, LocalStore, Store, encode_json, read_json, read_log
from runner.train import profiler as profile
from runner.train.profiler import REQUEST, Profiler, request_profile, take_profile_request
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import make_gpt, make_gpt_document, stop_after


@pytest.fixture
def profiler_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace JAX's profiler and return the list of calls."""
    found: list[str] = []

    def start_trace(folder: str) -> None:
        found.append(f"begin {Path(folder).name}")
        (Path(folder) / "trace").write_bytes(b"x")

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("end"))
    monkeypatch.setattr(jax.profiler, "device_memory_profile", lambda: b"memory")
    return found


def read_profile_events(store: Store) -> list[JsonObject]:
    return [event for event in read_log(store, "events") if event["event"] == "profile"]


def get_steps(found: list[JsonObject]) -> list[tuple[int, int]]:
    return [(event["start"], event["step"]) for event in found]


@pytest.mark.soak
def test_the_steps_of_the_spec_are_profiled_and_the_run_is_bit_identical(tmp_path: Path) -> None:
    make_gpt(tmp_path / "plain")()
    make_gpt(tmp_path / "run", **{"logging.profile": "3:5"})()
    plain, run = (LocalStore(tmp_path / name) for name in ("plain", "run"))
    assert read_json(run, "result.json") == read_json(plain, "result.json")
    (event,) = read_profile_events(run)
    assert (event["start"], event["step"], event["path"]) == (3, 5, "profiles/000001.3-5")
    folder = tmp_path / "run" / event["path"]
    assert gzip.decompress((folder / "memory.prof").read_bytes())
    assert len(list(folder.rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize(
    ("spec", "first", "steps", "recorded"),
    [
        ("3:5", 0, 8, [(3, 5)]),
        ("0:2", 0, 8, [(0, 2)]),
        ("3:5", 3, 8, [(3, 5)]),
        ("3:6", 4, 8, [(4, 6)]),  # resumed inside the range
        ("3:5", 5, 8, []),
        ("6:20", 0, 8, [(6, 8)]),  # the run ends inside the range
        (None, 0, 8, []),
    ],
)
def test_profiled_steps_lie_within_the_attempt(
    spec: str | None, first: int, steps: int, recorded: list[tuple[int, int]], profiler_calls: list[str], tmp_path: Path
) -> None:
    store = LocalStore(tmp_path)
    profiler = Profiler(make_attempt(store), spec)
    for step in range(first, steps + 1):
        profiler.on_step(step)
    profiler.close(steps)
    assert get_steps(read_profile_events(store)) == recorded
    assert profiler_calls[1::2] == ["end"] * len(recorded)


class RequestingGPT(PretrainGPT):
    """A job that requests a profile at step 2 and waits until the polling thread has read the request."""

    has_been_asked = threading.Event()

    def save_or_stop(self) -> None:
        super().save_or_stop()
        if self.step == 2:
            assert run_command(["profile", str(self.store.url), "--steps", "3"]) == 0
            while self.session.report._profiler._requested_steps is None:
                assert not self.session.report._profiler._closed.wait(0.001)


@pytest.mark.soak
def test_a_running_job_profiles_its_next_steps_on_request(
    profiler_calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "POLL_SECONDS", 0.001)
    job = make_gpt(tmp_path / "run", RequestingGPT)
    stop_after(job, 7)
    make_gpt(tmp_path / "run")()
    assert get_steps(read_profile_events(job.store)) == [(3, 6)]
    assert profiler_calls == ["begin 000001.3-6", "end"]


def test_a_profile_is_copied_to_the_bucket(
    profiler_calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    store = make_memory_bucket()
    attempt = make_attempt(store)
    profiler = Profiler(attempt, "1:2")
    for step in range(4):
        profiler.on_step(step)
    profiler.close(3)
    attempt.background_writer.flush()
    (event,) = read_profile_events(store)
    assert sorted(store.list_sizes(event["path"])) == ["memory.prof", "trace"]


@pytest.mark.parametrize("place", ["start_trace", "stop_trace", "device_memory_profile"])
def test_a_failing_profile_is_a_warning(
    place: str,
    profiler_calls: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, place, fail)
    store = LocalStore(tmp_path)
    profiler = Profiler(make_attempt(store), "1:3")
    for step in range(5):
        profiler.on_step(step)
    profiler.close(4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "no profile of steps 000001.1-3: RuntimeError: Only one profile may be run at a time."
    assert read_profile_events(store) == []


@pytest.mark.parametrize("store", [make_memory_bucket(), None], ids=["bucket", "disk"])
def test_a_request_is_taken_once_and_a_malformed_one_is_ignored(store: Store | None, tmp_path: Path) -> None:
    store = store or LocalStore(tmp_path)
    assert take_profile_request(store) is None
    request_profile(store, 7)
    assert [take_profile_request(store), take_profile_request(store)] == [7, None]
    for other in (b"", b"[]", b"{}", encode_json({"steps": -1}), encode_json({"steps": 10**9}), b'{"steps": "3"}'):
        store.write(REQUEST, other)
        assert [take_profile_request(store), store.exists(REQUEST)] == [None, False]


@pytest.mark.parametrize("value", ["5:5", "5:3", f"0:{MAX_PROFILE_STEPS + 1}", "5", "a:b", ""])
def test_invalid_step_ranges_are_rejected(value: str, tmp_path: Path) -> None:
    document = parse_document(json.dumps(make_gpt_document(tmp_path, **{"logging.profile": value})), "x.yaml")
    with pytest.raises(SpecError, match=r"logging\.profile"):
        validate_spec(document)


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", str(MAX_PROFILE_STEPS + 1)], []])
def test_requests_for_too_many_steps_or_without_a_run_are_rejected(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidError):
        run_command(["profile", str(tmp_path), *words])
    assert not list(tmp_path.iterdir())
