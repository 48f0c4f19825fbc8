"""`evaluate --save-top-k`: predictions of a model as a corpus, the same whatever kills the command, and read back."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from runner.cli.app import main
from runner.config import DataConfig
from runner.data import load_dataset
from runner.data.corpus_index import CorpusIndex
from runner.errors import DataError
from runner.inference import top_k
from runner.inference.open_run import load_model, open_run
from runner.process import make_placements
from tests.data.datasets import write_bin
from tests.support.arrays import CHANGES, CountBright
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import make_counter, make_gpt, start_python, wait_for_output

T, K = 16, 4
SMALL_SHARD_BYTES = 400 * 28  # of 400 tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, and a text of three documents beside it."""
    directory = tmp_path_factory.mktemp("teacher") / "run"
    changes = {"config.train.total_steps": 2, "config.optimizer.learning_rate": 0.1, "config.schedule.warmup_steps": 0}
    make_gpt(directory, **changes)()
    folder = directory.parent / "texts"
    folder.mkdir()
    for number, size in enumerate((500, 30, 477)):
        (folder / f"{number}.txt").write_text("".join(f"{n} and {n * n * number}. " for n in range(size))[:size])
    return directory


def save(run: Path, output: Path | str, *words: object, source: object = None) -> int:
    data = run.parent / "texts/*.txt" if source is None else source
    options = ["--data", data, "--save-top-k", K, "-o", output, *words]
    # A later option replaces an earlier one.
    return main(["evaluate", "--trust", "tests", str(run), *map(str, options)])


def read_records(output: Path) -> tuple[CorpusIndex, np.ndarray, np.ndarray]:
    """Return the index, the ids and the predictions of a corpus."""
    index = CorpusIndex.decode((output / "index.json").read_bytes(), "index.json")
    assert index.top_dtype is not None
    names = [shard.name for shard in index.shards]
    ids = np.concatenate([np.fromfile(output / f"{name}.bin", index.dtype) for name in names])
    return index, ids, np.concatenate([np.fromfile(output / f"{name}.top", index.top_dtype) for name in names])


@pytest.mark.daily(1)
@pytest.mark.parametrize("packing", ["concatenate", "documents", "pad"])
def test_each_target_has_the_logits_of_the_model(
    run: Path, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "SHARD_BYTES", SMALL_SHARD_BYTES)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    text = (copy / "spec.yaml").read_text()
    (copy / "spec.yaml").write_text(text.replace("packing: concatenate", f"packing: {packing}"))
    assert save(copy, tmp_path / "top", source=run.parent / "texts/*.txt") == 0
    index, ids, records = read_records(tmp_path / "top")
    texts = [path.read_bytes() for path in sorted((run.parent / "texts").iterdir())]
    assert ids.tobytes() == np.frombuffer(b"".join(texts), np.uint8).astype("<u2").tobytes()
    assert [shard.num_tokens for shard in index.shards] == [401, 400, 206]
    assert index.tokenizer == {"kind": "bytes"}

    is_target = np.isfinite(records["log_sum"])
    loaded = load_model(open_run(str(copy)))
    ends = np.cumsum([0, *map(len, texts)])
    # A part of a document begins at its start, at the end of a shard, and after each T inputs.
    if packing == "concatenate":
        assert is_target.tolist() == [0 < place <= (len(ids) - 1) // T * T for place in range(len(ids))]
    else:
        assert np.flatnonzero(~is_target).tolist() == ends[:-1].tolist()
    for place in (1, 17, 399, 400, 401, 402, 510, 533, 800, 801, 990):
        if packing == "concatenate":
            first = (place - 1) // T * T
        else:
            part = max(ends[ends < place].max(), *(bound for bound in (0, 400, 800) if bound < place))
            first = part + (place - 1 - part) // T * T
        inputs = ids[first:place].astype(np.int32)[None]
        logits: Any = loaded.model.apply(loaded.variables, inputs, deterministic=True)
        logits = np.asarray(logits[0, -1], np.float64)
        record = records[place]
        np.testing.assert_allclose(record["logits"], np.sort(logits)[::-1][:K], rtol=1e-5)
        np.testing.assert_allclose(logits[record["ids"]], record["logits"], rtol=1e-5)
        np.testing.assert_allclose(record["log_sum"], np.log(np.exp(logits).sum()), rtol=1e-5)


KILLED = """
import os, signal, sys
from runner.cli.app import main
from runner.inference import top_k

top_k.SHARD_BYTES, left, replace = int(sys.argv[1]), int(sys.argv[2]), os.replace

def replace_or_die(source, target):
    global left
    if str(target).startswith(sys.argv[3]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)  # between the write of a temporary file and its new name
    replace(source, target)

os.replace = replace_or_die
sys.exit(main(["evaluate", *sys.argv[4:]]))
"""


def test_a_killed_command_goes_on_to_the_same_bytes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shards of four files each and the index, of which the first, the fifth and the last write are killed."""
    monkeypatch.setattr(top_k, "SHARD_BYTES", SMALL_SHARD_BYTES)
    assert save(run, tmp_path / "whole") == 0
    output = tmp_path / "killed"
    words = [str(run), "--data", str(run.parent / "texts/*.txt"), "--save-top-k", str(K), "-o", str(output)]
    num_shards = []
    for num_writes in (2, 5, 8):
        process = start_python("-c", KILLED, str(SMALL_SHARD_BYTES), str(num_writes), str(output), *words, devices=8)
        printed, _ = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, printed
        assert not (output / "index.json").exists()
        num_shards.append(len([*output.glob("0*.json")]))
        with pytest.raises(DataError, match="is a directory, and no corpus"):
            load_dataset(make_config(output), seed=0, batch_examples=4)
    assert num_shards == [0, 1, 3]
    assert [*output.glob(".*.tmp")]
    assert save(run, output) == 0
    assert hash_tree(output) == hash_tree(tmp_path / "whole")
    # A finished one stays as it is.
    assert save(run, output) == 0
    assert hash_tree(output) == hash_tree(tmp_path / "whole")


def test_a_damaged_file_is_found_before_the_index_is_written(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert save(run, tmp_path / "top") == 0
    (tmp_path / "top/index.json").unlink()
    content = bytearray((tmp_path / "top/00000.top").read_bytes())
    content[100] ^= 1
    (tmp_path / "top/00000.top").write_bytes(content)
    assert save(run, tmp_path / "top") == 2
    assert re.search(r"00000\.top is damaged; remove 00000\.json and run again", capfd.readouterr().err)
    (tmp_path / "top/00000.json").unlink()
    assert save(run, tmp_path / "top") == 0


def make_config(corpus: Path, **keys: Any) -> DataConfig:
    values = {"source": str(corpus), "sequence_length": T, "options": {"top_k": K}, "validation_fraction": 0.1}
    return DataConfig.model_validate(values | keys)


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_predictions_stand_at_the_target_they_belong_to(
    run: Path, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "SHARD_BYTES", SMALL_SHARD_BYTES)
    assert save(run, tmp_path / "top") == 0
    _, ids, records = read_records(tmp_path / "top")
    data = load_dataset(make_config(tmp_path / "top", packing=packing), seed=3, batch_examples=4)
    batch = data.read("train", 4, 8)
    assert batch["teacher_ids"].shape == (8, T, K)
    places = [data.train_sources[0].examples.get_spans(origin.number) for origin in data.find_origins(np.arange(4, 12))]
    for row, spans in enumerate(places):
        targets = np.concatenate([np.arange(start + 1, start + 1 + length) for start, length in spans])
        is_real = batch["padding_mask"][row]
        assert (batch["y"][row][is_real] == ids[targets]).all()
        for name in ("ids", "logits", "log_sum"):
            assert (batch[f"teacher_{name}"][row][is_real] == records[name][targets]).all()
    # Fewer of them are the most likely ones, and a batch is the same if nothing was read before.
    config = make_config(tmp_path / "top", packing=packing, options={"top_k": 2})
    fewer = load_dataset(config, seed=3, batch_examples=4).read("train", 4, 8)
    assert (fewer["teacher_ids"] == batch["teacher_ids"][..., :2]).all()
    plain = load_dataset(make_config(tmp_path / "top", packing=packing, options={}), seed=3, batch_examples=4)
    assert {*batch} - {*plain.fields} == {"teacher_ids", "teacher_logits", "teacher_log_sum"}
    assert (plain.read("train", 4, 8)["x"] == batch["x"]).all()


def test_a_source_without_the_predictions_is_refused(run: Path, tmp_path: Path) -> None:
    assert save(run, tmp_path / "top") == 0
    text = tmp_path / "a.txt"
    text.write_text("some text " * 100)
    load_dataset(make_config(tmp_path / "top", validation={"other": str(text)}), seed=0, batch_examples=4)
    for changes, message in (
        ({"options": {"top_k": 5}}, "top_k=5: the corpus has 4 predictions of a teacher per token"),
        ({"options": {"top_k": "4"}}, "top_k=4: needs a whole number"),
        ({"options": {"top": 4}}, "data.options: got an unexpected keyword argument 'top'"),
        ({"source": str(text)}, "options=.*nothing reads it"),
    ):
        with pytest.raises(DataError, match=message):
            load_dataset(make_config(tmp_path / "top", **changes), seed=0, batch_examples=4)
    sources = [{"name": name, "source": str(tmp_path / "top"), "options": {"top_k": K}} for name in "ab"]
    sources[1]["options"] = {}
    mixture = DataConfig.model_validate({"mixture": sources, "sequence_length": T})
    with pytest.raises(DataError, match=r"data\.mixture\.b=.*has the fields x, y, padding_mask, needs"):
        load_dataset(mixture, seed=0, batch_examples=4)
    content = bytearray((tmp_path / "top/00000.top").read_bytes())
    content[5000] ^= 1
    (tmp_path / "top/00000.top").write_bytes(content)
    with pytest.raises(DataError, match=r"00000\.top is not the file that index\.json was written for"):
        load_dataset(make_config(tmp_path / "top"), seed=0, batch_examples=4)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "more than the vocabulary": (["--save-top-k", "257"], r"--save-top-k 257: the model's vocabulary has 256 ids"),
    "none": (["--save-top-k", "0"], "input should be greater than or equal to 1"),
    "other k": (["--save-top-k", "5"], r"holds another data set, whose top_k is 4 and not 5"),
    "other step": (["--step", "2"], r"holds another data set, whose step is 2 and not 1|whose step is 1 and not 2"),
    "other files": (["-o", "FILES"], r"holds notes\.txt, which this command has not written"),
    "a file": (["-o", "FILES/notes.txt"], r"is a file, needs the name of a directory"),
    "in the run": (["-o", "RUN/top"], r"lies in the run's directory"),
    "other data": (["--data", "OTHER"], r"holds another data set, whose data is"),
    "all steps": (["--all"], r"--save-top-k writes the predictions of one step"),
    "no data": (["--data", ""], r"--save-top-k needs --data SOURCE and -o OUT"),
}


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    """Output of the first step, and a directory of the user's own."""
    (run.parent / "files").mkdir()
    (run.parent / "files/notes.txt").write_text("mine")
    (run.parent / "other.txt").write_text("other " * 100)
    assert save(run, run.parent / "top") == 0
    record = json.loads((run.parent / "top/teacher.json").read_text())
    (run.parent / "stepped").mkdir()
    (run.parent / "stepped/teacher.json").write_text(json.dumps(record | {"step": 1}))
    return run.parent


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(
    run: Path, written: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words, message = MISTAKES[name]
    places = {"FILES": written / "files", "RUN": run, "OTHER": written / "other.txt"}
    words = [re.sub("|".join(places), lambda found: str(places[found.group()]), word) for word in words]
    output = written / ("stepped" if name == "other step" else "top")
    before = hash_tree(written)
    capfd.readouterr()
    assert save(run, output, *words) == 2
    err = capfd.readouterr().err
    assert re.search(message, err.splitlines()[-1]), err
    assert "Traceback" not in err
    assert hash_tree(written) == before


@pytest.mark.parametrize("kind", ["arrays", "no model"])
def test_a_run_without_a_language_model_is_refused(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    if kind == "arrays":
        make_gpt(directory, CountBright, **CHANGES, **{"config.schedule": {}})()
    else:
        make_counter(directory, **{"config.total_steps": 1})()
    ids = write_bin(tmp_path / "ids.bin", np.arange(100))
    assert save(directory, tmp_path / "top", source=ids) == 2
    assert re.search("needs a language model|trains no model of tokens", capfd.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "top").exists()


@pytest.mark.soak
def test_the_predictions_do_not_depend_on_the_devices(run: Path, tmp_path: Path) -> None:
    """Eight devices in this process, one in the other."""
    assert jax.device_count() == 8
    assert save(run, tmp_path / "many") == 0
    words = [str(run), "--data", str(run.parent / "texts/*.txt"), "--save-top-k", str(K), "-o", str(tmp_path / "one")]
    wait_for_output(start_python("-m", "runner", "evaluate", *words, devices=1))
    many, one = read_records(tmp_path / "many")[2], read_records(tmp_path / "one")[2]
    np.testing.assert_allclose(many["logits"], one["logits"], atol=1e-4)
    np.testing.assert_allclose(many["log_sum"], one["log_sum"], atol=1e-4)


@pytest.mark.soak
def test_several_processes_write_what_one_writes(run: Path, tmp_path: Path) -> None:
    assert save(run, tmp_path / "alone") == 0
    words = ["-m", "runner", "evaluate", str(run), "--data", str(run.parent / "texts/*.txt"), "--save-top-k", str(K)]
    words += ["-o", str(tmp_path / "several")]
    for output in [start_python(*words, *place, devices=4) for place in make_placements(2)]:
        wait_for_output(output)
    (index, ids, records), alone = read_records(tmp_path / "several"), read_records(tmp_path / "alone")
    assert index.num_tokens == alone[0].num_tokens
    assert (ids == alone[1]).all()
    np.testing.assert_allclose(records["logits"], alone[2]["logits"], atol=1e-4)
