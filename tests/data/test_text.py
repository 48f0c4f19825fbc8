import logging
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from runner.data.open_source import TokenisedText, load_text
from runner.data.remote import CacheSettings
from runner.data.source_files import find_source
from runner.errors import DataError


def load(path: Path, cache: Path) -> TokenisedText:
    return load_text(find_source(str(path)), "characters", CacheSettings(cache))


def test_files_are_concatenated_in_order_and_undecodable_bytes_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\xff")
    (tmp_path / "b.txt").write_bytes(b"two")
    source = find_source(f"{tmp_path}/*.txt")
    text = load_text(source, "bytes", CacheSettings(tmp_path / "cache"))
    assert text.ids.tobytes() == b"one\xfftwo"
    text = load_text(source, "characters", CacheSettings(tmp_path / "cache"))
    assert text.tokenizer.decode(text.ids) == "one\ufffdtwo"


@pytest.mark.parametrize("name", ["bytes", "characters"])
def test_a_separator_is_inserted_only_between_files(tmp_path: Path, name: Literal["bytes", "characters"]) -> None:
    for number, content in enumerate((b"one", b"", b"two")):
        (tmp_path / f"{number}.txt").write_bytes(content)
    source = find_source(f"{tmp_path}/*.txt")
    for separator in (b"", b"\n", b"\0"):
        for _ in ("tokenised", "from the cache"):
            text = load_text(source, name, CacheSettings(tmp_path / "cache"), separator)
            assert text.tokenizer.decode(text.ids) == (b"one" + separator * 2 + b"two").decode()
    one = load_text(find_source(f"{tmp_path}/0.txt"), name, CacheSettings(tmp_path / "cache"), b"\n")
    assert one.tokenizer.decode(one.ids) == "one"


def test_the_second_start_reads_only_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("hello wörld")
    first = load(tmp_path / "a.txt", tmp_path / "cache")
    monkeypatch.delattr("runner.data.open_source.tokenise")
    second = load(tmp_path / "a.txt", tmp_path / "cache")
    assert isinstance(second.ids, np.memmap)
    assert second.ids.tolist() == first.ids.tolist()
    assert second.sha256 == first.sha256
    assert second.tokenizer.decode(second.ids) == "hello wörld"


def test_the_cached_array_is_a_plain_npy_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabc")
    load(tmp_path / "a.txt", tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.npy")
    assert np.load(path, allow_pickle=False).tolist() == [0, 1, 2, 0, 1, 2]


def test_a_damaged_or_missing_cached_array_is_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    expected = load(tmp_path / "a.txt", tmp_path / "cache").ids.tolist()
    (path,) = (tmp_path / "cache").glob("*.npy")
    whole = path.read_bytes()
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    for damaged in (whole[:-1], whole[:10], b"", flipped, None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert load(tmp_path / "a.txt", tmp_path / "cache").ids.tolist() == expected
        assert path.read_bytes() == whole


def test_a_changed_file_is_tokenised_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa")
    first = load(tmp_path / "a.txt", tmp_path / "cache")
    (tmp_path / "a.txt").write_text("abab!")
    second = load(tmp_path / "a.txt", tmp_path / "cache")
    assert second.tokenizer.decode(second.ids) == "abab!"
    assert second.sha256 != first.sha256


def test_an_unwritable_cache_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        text = load(tmp_path / "a.txt", tmp_path / "cache")
    assert text.tokenizer.decode(text.ids) == "hello"
    assert "cannot write the data cache" in caplog.text
    assert "set RUNNER_CACHE" in caplog.text


@pytest.mark.soak
def test_processes_racing_for_one_cache_agree_and_leave_no_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 50_000)
    program = (
        "import hashlib, sys; from pathlib import Path\n"
        "from runner.data.source_files import find_source; from runner.data.open_source import load_text\n"
        "from runner.data.remote import CacheSettings\n"
        "print('ready', flush=True); sys.stdin.readline(); kept = []\n"
        "for _ in range(10):\n"
        "    for _ in range(2):  # built, then mapped, while the other process publishes the same array anew\n"
        "        text = load_text(find_source(sys.argv[1]), 'characters', CacheSettings(Path(sys.argv[2])))\n"
        "        kept.append(text.ids)\n"
        "    assert {hashlib.sha256(ids.data).hexdigest() for ids in kept} == {text.sha256}\n"
        "    [path.unlink(missing_ok=True) for path in Path(sys.argv[2]).glob('*.json')]\n"
        "print(text.sha256)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    outputs = [racer.communicate("go\n") for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    assert outputs[0] == outputs[1] != ("", "")
    assert not list((tmp_path / "cache").glob(".*"))


def test_an_unreadable_file_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    source = find_source(f"{tmp_path}/a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        load_text(source, "bytes", CacheSettings(tmp_path / "cache"))
