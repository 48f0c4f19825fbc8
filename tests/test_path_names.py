"""Directories with unusual names: each path of a spec and of a command line names exactly one directory.

A name may look like a glob, a variable, a format or an option. Siblings that it would match as a glob have other files.
"""

import contextlib
import functools
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from experiments.tokenise.inputs import find_files, read_file
from runner.cli.app import run_command
from runner.config import DataConfig
from runner.data.chat import read_template
from runner.data.open_source import open_source
from runner.data.source_files import find_source
from runner.errors import DataError, InvalidError
from runner.evaluation.likelihood import read_questions
from runner.huggingface.export import publish_directory
from runner.huggingface.safetensors import open_published_weights
from runner.inference.evaluate import parse_source
from runner.plan.program import request_dumps
from runner.spec import CheckpointConfig, load_document
from runner.storage import local_directory, open_store
from tests.data.buckets import make_random_shards, serve_from, write_corpus
from tests.data.datasets import load, write_bin, write_npy
from tests.data.golden import CASES, copy_golden
from tests.huggingface.small import make_leaves, write_export
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import (
    make_counter,
    make_gpt,
    make_gpt_document,
    read_outcome,
    start_python,
    stop_after,
    wait_for_output,
)
from tests.support.tokenise_inputs import make_hf_tokenizer, make_jsonl, make_tokenise_job, read_corpus_files

PLAIN = "plain"
NAMES = (
    "d[2]",
    "lr[1e-3]",
    "[a-z]",
    "[!a]",
    "**",
    "*",
    "d?",
    "{a}",
    "{0} %s",
    "~",
    "%41",
    "a:b",
    "c:",
    " a b ",
    "new\nline",
    "ünï数",
    r"back\slash",
    "it's",
    'say "no"',
    "$HOME",
    "$(date)",
    "#a",
    "a&b;c|d",
    "a@10",
    "-o",
    "run.yaml",
    "checkpoints",
)
# Names for tests that take long: a glob, everything else at once, and the directory of a run's checkpoints.
FEW_NAMES = ("[a-z]", "**{0}%41 $HOME\\n\"it's\n#&; ", "checkpoints")
# Names of directories beside it that a name above would match as a glob, a variable or an escape.
SIBLINGS = ("d2", "lr1", "a", "b", "A")
RUN = Path(__file__).parent / "data/format_1/counter"


# Returns what a path below a directory of an unusual name has given. Its arguments: the directory with inputs, and an
# empty directory of a usual name, for everything else that is written.
Taker = Callable[[Path, Path], Any]

SOURCES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "text": ("t.txt", {}),
    "glob of text": ("*.txt", {}),
    "glob of text at any depth": ("**/?.txt", {}),
    "bin": ("a.bin", {}),
    "glob of bin": ("[a-z].bin", {}),
    "npy": ("a.npy", {}),
    "corpus": ("corpus", {}),
    "index of a corpus": ("corpus/index.json", {}),
    "parquet": ("tables/*.parquet", {}),
    **{
        name: (f"golden/{CASES[name].source}", CASES[name].options)
        for name in ("megatron_several", "mds_array", "mds_indexes", "array_record", "array_record_several")
    },
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of every kind."""
    directory = tmp_path_factory.mktemp("inputs") / "of"
    copy_golden(directory / "golden")
    write_bin(directory / "a.bin", np.arange(3000))
    write_npy(directory / "a.npy", np.arange(3000))
    write_corpus(
        directory / "corpus", make_random_shards([[300, 200], [100]], vocabulary_size=250), vocabulary_size=250
    )
    for name in ("t", "u"):
        (directory / f"{name}.txt").write_text(f"text {name} " * 40)
        (directory / f"{name}.jsonl").write_bytes(make_jsonl([f"line {name} {number}" for number in range(5)]))
    (directory / "tables").mkdir()
    pq.write_table(pa.table({"input_ids": [[1, 2, 3], [4, 5]] * 20}), directory / "tables/0.parquet")
    (directory / "tokenizer.json").write_bytes(make_hf_tokenizer())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (directory / "questions.jsonl").write_text('{"question": "1 + 1", "choices": ["2", "3"], "answer": 0}\n')
    write_export(directory / "weights", make_leaves())
    shutil.copytree(RUN, directory / "count")
    shutil.copy(RUN / "spec.yaml", directory)

    return directory


def link_inputs(inputs: Path, parent: Path, name: str) -> Path:
    """Make a directory of this name with the inputs, among siblings with other inputs, and return it."""
    for sibling in SIBLINGS:
        (parent / sibling).mkdir(parents=True, exist_ok=True)
        write_bin(parent / sibling / "a.bin", np.arange(7, 3000))
        for file in ("t.txt", "v.txt", "t.jsonl"):
            (parent / sibling / file).write_text('{"text": "of a sibling"}\n')
    return Path(shutil.copytree(inputs, parent / name, copy_function=os.link))


def read_sources(
    directory: Path | str, work: Path, sources: Mapping[str, tuple[str, Mapping[str, str]]] = SOURCES
) -> dict[str, str]:
    found = {}
    for kind, (place, options) in sources.items():
        config = DataConfig.model_validate({"sequence_length": 8, "source": f"{directory}/{place}", "options": options})
        found[kind] = open_source(config, config, work, None).fingerprint
    return found


def read_relative_sources(directory: Path, work: Path) -> dict[str, str]:
    kinds = {kind: SOURCES[kind] for kind in ("glob of text", "corpus", "array_record_several")}
    with contextlib.chdir(directory.parent):
        # `~` alone would be the home directory.
        return read_sources(f"./{directory.name}" if directory.name == "~" else directory.name, work, kinds)


def validate_on_other_files(directory: Path, work: Path) -> dict[str, Any]:
    validation = {"other": f"{directory}/[a-z].bin", "more": f"{directory}/golden/megatron/uint16_*.idx"}
    dataset = load(directory / "a.npy", cache=work, validation=validation)
    return {name: dataset.read(name, 0, 4)["x"].tolist() for name in validation}


def tokenise(directory: Path, work: Path) -> dict[str, bytes]:
    keys = {
        "config.source": f"{directory}/?.jsonl",
        "config.tokenizer": {"kind": "hf", "file": f"{directory}/tokenizer.json"},
        "config.output": f"{directory}/output",
    }
    make_tokenise_job(work / "run", **keys)()
    # The list of the input files has their paths.
    return {
        name: content for name, content in read_corpus_files(directory / "output").items() if name != "sources.json"
    }


def keep_fast_tier(directory: Path, work: Path) -> Any:
    """Stop a job after a save to the fast tier, and go on from there."""
    keys = {"checkpoint.local_directory": str(directory / "fast"), "checkpoint.local_every_steps": 1}
    stop_after(make_counter(work, **keys, **{"checkpoint.every_steps": 10, "config.total_steps": 4}), 3)
    job = make_counter(work, **keys, **{"config.total_steps": 4})
    job()
    return job.result()["fingerprint"], sorted(path.name for path in (directory / "fast").rglob("part.json"))


def read_weights(where: str) -> dict[str, Any]:
    published = open_published_weights(open_store(where))
    return {name: [tensor.shape for tensor in each.stored] for name, each in published.tensors.items()}


def write_directory(directory: Path, work: Path) -> dict[str, bytes]:
    with publish_directory(f"{directory}/export") as made:
        (made / "config.json").write_text("{}")
    return {path.name: path.read_bytes() for path in (directory / "export").iterdir()}


def run_commands(directory: Path, work: Path) -> list[str]:
    """Return what the read-only commands print of a run, with their exit codes."""
    run, shown = f"{directory}/count", io.TextIOWrapper(io.BytesIO(), write_through=True)
    spec = yaml.safe_load((RUN / "spec.yaml").read_text()) | {"directory": run}
    (directory / "own.yaml").write_text(yaml.safe_dump(spec))
    commands = [
        ["status", run, "--json"],
        ["status", f"{directory}/own.yaml", "--json"],
        ["checkpoints", run, "--verify"],
        ["metrics", run],
        ["metrics", run, "--csv", "-o", f"{directory}/metrics.csv"],
        ["lineage", str(directory), "--json"],
        ["checkpoints", "copy", run, f"{directory}/copy"],
        ["checkpoints", f"{directory}/copy", "--verify"],
    ]
    with contextlib.redirect_stdout(shown):
        codes = [run_command(command) for command in commands]
    found = (
        shown.buffer.getvalue()
        .decode()
        .replace(json.dumps(str(directory))[1:-1], "HERE")
        .replace(str(directory), "HERE")
    )
    found = "\n".join(line for line in found.split("\n") if "HERE" not in line)
    return [str(codes), found, (directory / "metrics.csv").read_text()]


def find_few(directory: Path, work: Path) -> Any:
    """Return what small files hold, which are read at once."""
    return (
        [file.size_bytes for file in find_files(f"{directory}/*.txt")],
        read_template(f"{directory}/tokenizer_config.json", read_file).sha256,
        read_questions(f"{directory}/questions.jsonl"),
        read_weights(f"{directory}/weights"),
        load_document(f"{directory}/spec.yaml").data,
    )


# Paths that are read or written in milliseconds.
TAKERS: dict[str, Taker] = {
    "config.data.source": read_sources,
    "config.data.source, relative": read_relative_sources,
    "config.data.validation": validate_on_other_files,
    "config.source, config.chat.template, config.eval.tasks.path, published weights, SPEC": find_few,
    "export -o": write_directory,
}

# Paths of whole jobs and commands, of about a second each.
JOBS: dict[str, Taker] = {
    "config.source, config.tokenizer.file and config.output": tokenise,
    "checkpoint.local_directory": keep_fast_tier,
    "SPEC_OR_DIRECTORY and -o": run_commands,
}


def train(directory: Path, **changes: Any) -> Any:
    """Stop a job and go on from its checkpoint; return the rows and the result."""
    make = functools.partial(make_gpt, directory, **{"checkpoint.every_steps": 2, "checkpoint.keep_last": 2}, **changes)
    stop_after(make(), 5)
    make()()
    assert run_command(["checkpoints", str(directory), "--deep"]) == 0
    return read_outcome(directory)


def make_parent(work: Path) -> Path:
    """Return a finished run."""
    make_gpt(work / "parent", **{"checkpoint.every_steps": 2})()
    return work / "parent"


def train_below(directory: Path, work: Path) -> Any:
    """Train with everything that libraries write into the directory of a run."""
    changes = {"logging.wandb": "offline", "logging.tensorboard": True, "logging.profile": "1:2"}
    (work / "spec.yaml").write_text(yaml.safe_dump(make_gpt_document(directory / "logged", **changes)))
    wait_for_output(start_python("-m", "runner", str(work / "spec.yaml")))
    counts = [len(list((directory / "logged").rglob(name))) for name in ("*.xplane.pb", "*.wandb", "events.out*")]
    return train(directory / "run"), read_outcome(directory / "logged"), counts


def move_run(directory: Path, work: Path) -> Any:
    stop_after(make_gpt(work / "run", **{"checkpoint.every_steps": 2}), 4)
    (work / "run").rename(directory / "run")
    return train(directory / "run")


def fork(directory: Path, work: Path) -> Any:
    make_parent(work).rename(directory / "parent")
    fork_from = {"run": f"{directory}/parent", "step": 4, "changes": ["config.optimizer"]}
    return train(work / "fork", **{"checkpoint.fork_from": fork_from, "config.optimizer.learning_rate": 0.01})


def start_from(directory: Path, work: Path) -> Any:
    make_parent(work).rename(directory / "parent")
    found = train(work / "first", **{"checkpoint.init_from": f"{directory}/parent"})
    return found, train(work / "second", **{"checkpoint.init_from": f"{directory}/parent/checkpoints/4"})


def export_run(directory: Path, work: Path) -> Any:
    make_parent(work).rename(directory / "parent")
    for where in ("parent", "parent/checkpoints/8"):
        assert run_command(["export", f"{directory}/{where}", "-o", f"{directory}/export{len(where)}"]) == 0
    return [path.read_bytes() for path in sorted(directory.glob("export*/*"))]


def train_on_text(directory: Path, work: Path) -> Any:
    text = {"source": f"{directory}/?.txt", "tokenise": {"tokenizer": {"kind": "bytes"}}, "sequence_length": 16}
    return train(directory / "run", **{"config.data": text})


def launch(directory: Path, work: Path) -> Any:
    document = make_gpt_document(directory / "run", **{"checkpoint.every_steps": 2})
    (directory / "spec.yaml").write_text(yaml.safe_dump(document))
    words = ["launch", "local", f"{directory}/spec.yaml", "--processes", "2", "--devices-per-process", "1"]
    wait_for_output(start_python("-m", *words, RUNNER_CACHE=f"{directory}/cache", TMPDIR=str(directory)))
    return read_outcome(directory / "run")


# Paths of runs that train and save.
TRAINING: dict[str, Taker] = {
    "directory": train_below,
    "directory, moved": move_run,
    "checkpoint.fork_from": fork,
    "checkpoint.init_from": start_from,
    "export": export_run,
    "config.data.tokenise": train_on_text,
    "launch local, RUNNER_CACHE and TMPDIR": launch,
}


def compare_names(taker: Taker, names: tuple[str, ...], inputs: Path, tmp_path: Path) -> list[str]:
    """Return how the outcomes below directories of these names differ from that of a usual name."""
    problems, expected = [], None
    for number, name in enumerate((PLAIN, *names)):
        directory, work = link_inputs(inputs, tmp_path / f"{number}", name), tmp_path / f"work{number}"
        work.mkdir()
        try:
            found = taker(directory, work)
        except Exception as error:  # noqa: BLE001 - whatever comes out is what this test looks for
            problems.append(f"{name!r}: {type(error).__name__}: {error}"[:300])
            continue
        expected = found if name == PLAIN else expected
        if found != expected:
            problems.append(f"{name!r}: {found} instead of {expected}"[:600])
    return problems


@pytest.mark.daily(3)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_directory_of_an_unusual_name_is_read_like_any_other(taker: str, inputs: Path, tmp_path: Path) -> None:
    assert not compare_names(TAKERS[taker], NAMES, inputs, tmp_path)


@pytest.mark.parametrize(
    "taker", [pytest.param(taker, marks=() if number == 0 else pytest.mark.soak) for number, taker in enumerate(JOBS)]
)
def test_jobs_and_commands_take_a_few_unusual_names(taker: str, inputs: Path, tmp_path: Path) -> None:
    assert not compare_names(JOBS[taker], FEW_NAMES, inputs, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("taker", JOBS)
def test_jobs_and_commands_take_every_unusual_name(taker: str, inputs: Path, tmp_path: Path) -> None:
    assert not compare_names(JOBS[taker], NAMES, inputs, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("taker", TRAINING)
def test_a_run_in_a_directory_of_an_unusual_name_has_the_usual_bits(taker: str, inputs: Path, tmp_path: Path) -> None:
    assert not compare_names(TRAINING[taker], (*NAMES, *FEW_NAMES), inputs, tmp_path)


def test_a_directory_for_programs_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / FEW_NAMES[1]
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "")
        request_dumps(directory)
        flags = os.environ["XLA_FLAGS"]
    code = "import jax\ndef step(x): return x + 1\njax.jit(step)(1)"
    wait_for_output(start_python("-c", code, XLA_FLAGS=flags))
    assert list(directory.glob("*jit_step*"))
    assert list(tmp_path.iterdir()) == [directory]


def test_every_path_of_a_spec_is_in_a_table() -> None:
    keys = " ".join([*TAKERS, *JOBS, *TRAINING])
    named = {"directory", "config.data.source", "config.data.validation", "config.output", "config.source"}
    fields = CheckpointConfig.model_fields
    named |= {f"checkpoint.{key}" for key in fields if key.endswith(("directory", "init_from", "fork_from"))}
    assert not [key for key in named if key not in keys]


def test_a_prefix_of_an_unusual_name_is_read_like_any_other(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = MemoryDriver()
    serve_from(monkeypatch, driver)
    names = ("[a-z]", "**", "d?", FEW_NAMES[1])
    kinds = ("text", "glob of text", "glob of bin", "corpus", "index of a corpus", "mds_array", "parquet")
    places = {kind: SOURCES[kind] for kind in kinds}
    expected = read_sources(inputs, tmp_path / "cache", places)
    for path in (path for path in inputs.rglob("*") if path.is_file()):
        for name in names:
            driver.put(f"top/{name}/{path.relative_to(inputs).as_posix()}", path.read_bytes(), None)
    for sibling in SIBLINGS:
        for file in ("t.txt", "v.txt", "a.bin"):
            driver.put(f"top/{sibling}/{file}", b"of a sibling", None)
    for name in names:
        assert read_sources(f"s3://bkt/top/{name}", tmp_path / "cache", places) == expected, name
        # A prefix names all objects below it.
        assert [file.size_bytes for file in find_files(f"s3://bkt/top/{name}/tables")] == [
            (inputs / "tables/0.parquet").stat().st_size
        ]
        assert {file.size_bytes for file in find_files(f"s3://bkt/top/{name}/?.jsonl")} == {
            (inputs / file).stat().st_size for file in ("t.jsonl", "u.jsonl")
        }


def test_a_name_that_exists_is_no_pattern_and_one_that_does_not_is(tmp_path: Path) -> None:
    write_bin(tmp_path / "d2/a.bin", np.arange(10))
    assert [file.path.parent.name for file in find_source(f"{tmp_path}/d[2]/*.bin").files] == ["d2"]
    (tmp_path / "d[2]").mkdir()
    for place in ("*.bin", "a.bin", "a[1].bin"):
        with pytest.raises(DataError, match="no file matches"):
            find_source(f"{tmp_path}/d[2]/{place}")
    write_bin(tmp_path / "d[2]/a.bin", np.arange(20))
    assert [file.size_bytes for file in find_source(f"{tmp_path}/d[2]/*.bin").files] == [40]
    # After the first pattern every part belongs to the glob.
    assert [file.size_bytes for file in find_source(f"{tmp_path}/d*/a.bin").files] == [20, 40]
    assert [file.size_bytes for file in find_source(f"{tmp_path}/?[[]2]/a.bin").files] == [40]
    (tmp_path / "d[2]/b[1].bin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a link to"):
        find_source(f"{tmp_path}/d[2]/b[1].bin")


def test_a_name_that_begins_like_a_user_or_a_mapping_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("~nosuchuser", "{a: b}"):
        write_bin(tmp_path / name / "a.bin", np.arange(10))
    assert local_directory("~nosuchuser/run") == tmp_path / "~nosuchuser/run"
    assert find_source("~nosuchuser/*.bin").files[0].path == tmp_path / "~nosuchuser/a.bin"
    assert parse_source("{a: b}/*.bin").source == "{a: b}/*.bin"
    assert parse_source("{source: x.bin}").source == "x.bin"


@pytest.mark.parametrize("name", ["$HOME", r"back\slash", "$(date)"])
def test_a_job_that_begins_in_a_name_that_is_usually_a_mistake_is_refused(name: str, tmp_path: Path) -> None:
    for directory in (f"{tmp_path}/{name}", f"{tmp_path}/{name}/run"):
        with pytest.raises(InvalidError, match=r"variables are not expanded|backslash") as caught:
            make_counter(directory)()
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["runs[1]/*/*.jsonl", "*/run/*.jsonl", "run*/**/*.json", "runs[1]/run/events.jsonl"])
def test_a_source_that_the_job_itself_will_write_is_refused_whichever_way_it_is_read(
    source: str, tmp_path: Path
) -> None:
    (tmp_path / "runs1").mkdir()
    (tmp_path / "runs1/a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InvalidError, match="matches files that this job writes"):
        make_tokenise_job(tmp_path / "runs[1]/run", **{"config.source": f"{tmp_path}/{source}"})()
