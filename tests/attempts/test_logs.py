"""Log file of a process: copied to the directory at the end, bounded, and harmless to the run."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.attempts import logs
from runner.attempts.logs import drain_log_file, install_log_file, open_log_file
from runner.console import LOGGER, say, warn
from runner.storage import BackgroundWriter, LocalStore, Store
from tests.support.memory_bucket import make_memory_bucket


@pytest.fixture(autouse=True)
def _set_up_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    root = logging.getLogger()
    handlers = list(root.handlers), list(LOGGER.handlers)
    install_log_file()
    yield
    root.handlers[:], LOGGER.handlers[:] = handlers


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()


def start_log(store: Store) -> None:
    open_log_file(store, "job1234", 7, 1, BackgroundWriter())


def read_messages(store: Store, name: str = "000007.1.log") -> list[str]:
    """Return level, process and message of each line."""
    return [line.split(" ", 1)[1] for line in store.read(f"logs/{name}").decode().splitlines()]


def test_lines_from_before_the_claim_are_logged_too(store: Store) -> None:
    say("early")
    start_log(store)
    warn("straggler\n\x1b[2J")
    logging.getLogger("some.library").warning("of a library")
    drain_log_file()
    assert read_messages(store) == ["INFO [1] early", r"WARNING [1] straggler\n\x1b[2J", "WARNING [1] of a library"]


def test_a_long_log_keeps_its_newest_lines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LOG_BYTES", 2000)
    start_log(store)
    for number in range(200):
        say(f"line {number}")
    drain_log_file()
    first, *kept = read_messages(store)
    assert first.endswith("are in 000007.1.log.1; any older lines were deleted")
    numbers = [int(line.split()[-1]) for line in read_messages(store, "000007.1.log.1")[1:] + kept]
    assert numbers == list(range(numbers[0], 200))
    assert sum(store.list_sizes("logs").values()) < 2 * 2000 + 200


@pytest.mark.parametrize("place", ["logs/000007.1.log", "logs"])
def test_a_full_disk_loses_the_log_and_prints_one_line(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to("/dev/full")
    start_log(LocalStore(tmp_path))
    for _ in range(3):
        say("on")
    drain_log_file()
    shown, warned = capsys.readouterr()
    assert (shown, len(warned.splitlines())) == ("on\n" * 3, 1)


def test_installing_the_log_file_twice_gives_one_file(tmp_path: Path) -> None:
    install_log_file()
    start_log(LocalStore(tmp_path))
    say("once")
    drain_log_file()
    assert read_messages(LocalStore(tmp_path)) == ["INFO [1] once"]


def test_a_hanging_disk_blocks_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = threading.Event()
    monkeypatch.setattr(logs._Appender, "emit", lambda *_: free.wait())
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(logs, "_QUEUE_LINES", 2)
    install_log_file()
    start_log(LocalStore(tmp_path))
    for _ in range(5):
        say("on")
    drain_log_file()
    free.set()
    assert capsys.readouterr().out == "on\n" * 5
