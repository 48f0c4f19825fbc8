import os
import sysconfig
from pathlib import Path

import pytest

from runner.data.source_files import find_source, read_source_file
from runner.errors import DataError


def list_names(source: str) -> list[str]:
    return [file.path.name for file in find_source(source).files]


def test_a_glob_reads_files_below_directories_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/z.txt", "a/b/y.txt", "x.txt", "x.md"):
        (tmp_path / name).write_text(name)
    assert list_names(f"{tmp_path}/**/*.txt") == ["y.txt", "z.txt", "x.txt"]


def test_a_file_name_with_brackets_is_matched_literally(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text("one")
    assert list_names(f"{tmp_path}/part[1].txt") == ["part[1].txt"]


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("text")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list_names("~/book.txt") == ["book.txt"]


def test_the_standard_library_excludes_installed_and_generated_files() -> None:
    source = find_source("python-stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = [file.path.relative_to(root) for file in source.files]
    assert Path("json/decoder.py") in relative
    assert relative != sorted(relative)
    assert source == find_source("python-stdlib")
    for path in relative:
        assert not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
        assert not path.name.startswith(("_sysconfigdata", "sitecustomize"))


def test_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    with pytest.raises(
        DataError, match=r"data\.source=.*/shakespere\.txt: no file matches; did you mean .*/shakespeare"
    ):
        find_source(f"{tmp_path}/shakespere.txt")


def test_a_missing_directory_is_reported_instead_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "corpora").mkdir()
    with pytest.raises(DataError, match=r"/corpra/x\.txt: no file matches; did you mean .*/corpora\?"):
        find_source(f"{tmp_path}/corpra/x.txt")
    with pytest.raises(DataError, match=rf"no file matches; {tmp_path} holds no zzz"):
        find_source(f"{tmp_path}/zzz")


def test_a_link_to_nothing_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").symlink_to(tmp_path / "unmounted/corpus.bin")
    with pytest.raises(DataError, match=r"/corpus\.bin: is a link to .*/unmounted/corpus\.bin, and no file is there$"):
        find_source(f"{tmp_path}/corpus.bin")


def test_a_glob_that_matches_nothing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/\*\.txt: no file matches; .* is empty$"):
        find_source(f"{tmp_path}/*.txt")


def test_a_misspelt_name_is_corrected() -> None:
    with pytest.raises(DataError, match=r"data\.source=python-stlib: no file matches; did you mean python-stdlib\?"):
        find_source("python-stlib")


def test_a_directory_suggests_a_glob(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"is a directory, and no corpus \(index\.json\); name its files, as .*/\*\*/\*\.txt"
    ):
        find_source(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.txt.zst", "a.jsonl.gz", "a.parquet", "a.arrow", "a.idx", "a.mds", "a.pdf", "a.safetensors"]
)
def test_unsupported_files_are_rejected_and_not_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    (tmp_path / "b.txt").write_text("text")
    message = r"1 of 2 files are of a kind that is not read, the first is .*/a\..*; needs text .* or token ids"
    with pytest.raises(DataError, match=message):
        find_source(f"{tmp_path}/*")


@pytest.mark.parametrize("name", ["README", "a.TXT", "a.md", "a.rs"])
def test_text_is_recognised_by_its_suffix_or_lack_of_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    assert list_names(f"{tmp_path}/*") == [name]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.bin", r"https:// is not known; .* needs a local path or one of gs://, s3://, az://"),
        ("s3://bucket", "names no object; needs s3://bucket/NAME"),
        ("s3://", "names no bucket"),
        ("gs://buck*t/a.bin", "the name of a bucket cannot hold"),
    ],
)
def test_an_invalid_url_is_rejected_without_a_request(url: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_source(url)


def test_token_files_and_text_files_cannot_be_mixed(tmp_path: Path) -> None:
    for name in ("a.bin", "b.npy", "c.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=r"matches 2 token files \(\.bin, \.npy\) and 1 text files; name one kind"):
        find_source(f"{tmp_path}/*")


def test_a_file_that_grows_while_it_is_read_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("four")
    (file,) = find_source(str(path)).files
    path.write_text("longer")
    with pytest.raises(DataError, match=r"log\.txt changed while it was read: 4 bytes became 6"):
        read_source_file(file)


def test_a_file_that_vanishes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("four")
    (file,) = find_source(str(path)).files
    os.unlink(path)
    with pytest.raises(DataError, match=r"cannot read .*log\.txt: No such file"):
        read_source_file(file)
