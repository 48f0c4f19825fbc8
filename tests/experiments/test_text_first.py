"""`config.data.tokenise`: a run tokenises its text first, and is then the run on corpora that were made before."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.tokenise import inputs
from launch.supervisor import read_progress
from runner import BaseTrainer, RestoreableJob
from runner.checkpoint.manifest import read_newest_manifest
from runner.cli.app import run_command
from runner.distributed.preemption import StopNotice
from runner.errors import InvalidError, PreemptedError, StorageError
from runner.plan.checks import Findings, check_data
from runner.spec import make_document, read_spec
from runner.storage import LocalStore, bucket, read_log
from tests.support.bigram import BigramTrainer
from tests.support.hub import start_hub
from tests.support.job_process import WHOLE_RUN_DEADLINE_SECONDS, Job, kill_all_when
from tests.support.tiny_jobs import StopAfter, make_gpt, make_gpt_document, read_outcome
from tests.support.tokenise_inputs import DOCUMENTS, SEPARATOR, make_tokenise_job

BPE = {"kind": "bpe", "vocabulary_size": 280}
STEPS = 3


def write_texts(directory: Path) -> Path:
    """Write two texts of two columns each."""
    directory.mkdir(parents=True)
    for name, documents in (("web", DOCUMENTS[:60]), ("code", DOCUMENTS[60:])):
        lines = [json.dumps({"text": text, "code": f"print({text!r})"}) + "\n" for text in documents]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


def make_changes(texts: Path, **more: Any) -> dict[str, Any]:
    """Return the changes of a tiny run on a mixture of two texts, with a third one for validation."""
    sources = {name: str(texts / f"{name}.jsonl") for name in ("web", "code")}
    data = {
        "mixture": [
            {"name": "web", "source": sources["web"]},
            {"name": "code", "source": sources["code"], "options": {"field": "code"}, "weight": 2.0},
        ],
        "validation": {"other": sources["code"]},
        "tokenise": {"tokenizer": BPE, "separator": SEPARATOR, "shard_bytes": 600},
        "sequence_length": 16,
    }
    small = {"config.model": {"layers": 1, "heads": 2, "width": 16}, "config.schedule": {"warmup_steps": 1}}
    return small | {"config.data": data, "config.train.total_steps": STEPS, "config.eval": {"batches": 1}} | more


def make_single(texts: Path, **more: Any) -> dict[str, Any]:
    """Return the changes of a tiny run on one text."""
    data = {"source": str(texts / "web.jsonl"), "tokenise": {"tokenizer": BPE, "separator": SEPARATOR}}
    return make_changes(texts) | {"config.data": data | {"sequence_length": 16}} | more


class StopWhen(StopNotice):
    """Stop notice that arrives once `happens()`."""

    def __init__(self, happens: Callable[[], bool]):
        super().__init__()
        self._happens = happens

    def poll(self) -> bool:
        return self._happens()


def get_job(run: BaseTrainer, name: str) -> RestoreableJob:
    """Return the job of one text, or the run itself."""
    return next((job for text, job in run.texts if text.name == name), run)


def test_a_run_on_text_is_the_run_on_its_corpora_wherever_it_is_stopped(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    for name, step in (("web", 3), ("web", 1000), ("code", 500), ("other", 1000), ("run", 1)):
        run = make_gpt(tmp_path / "run", BigramTrainer, **make_changes(texts))
        with pytest.raises(PreemptedError):
            run(stop=StopAfter(get_job(run, name), step))
    # The text is not needed any more.
    moved = shutil.move(texts, tmp_path / "moved")
    run = make_gpt(tmp_path / "run", BigramTrainer, **make_changes(texts))
    run()
    # Supervisors recognise the end by the digest of the spec as written.
    (done,) = (event for event in read_log(run.store, "events") if event["event"] == "done")
    assert done["spec"] == make_document(run.spec).compute_digest()
    written = make_changes(texts)["config.data"]
    resolved = read_spec(tmp_path / "run/spec.yaml").config["data"]
    assert {key: resolved["tokenise"][key] for key in written["tokenise"]} == written["tokenise"]
    assert [each["source"] for each in resolved["mixture"]] == [each["source"] for each in written["mixture"]]

    sample = [{"source": str(moved / "web.jsonl")}, {"source": str(moved / "code.jsonl"), "field": "code"}]
    tokenizers: dict[str, dict[str, Any]] = {"web": BPE | {"sources": sample}}
    hf = {"kind": "hf", "file": str(tmp_path / "web/corpus/tokenizer.json")}
    for name, file, field in (("web", "web", "text"), ("code", "code", "code"), ("other", "code", "text")):
        keys = {"source": str(moved / f"{file}.jsonl"), "field": field, "tokenizer": tokenizers.get(name, hf)}
        keys |= {"separator": SEPARATOR, "shard_bytes": 600}
        make_tokenise_job(tmp_path / name, **{f"config.{key}": value for key, value in keys.items()})()
    data = {key: value for key, value in written.items() if key != "tokenise"}
    data["mixture"] = [
        {"name": "web", "source": str(tmp_path / "web/corpus")},
        {"name": "code", "source": str(tmp_path / "code/corpus"), "weight": 2.0},
    ]
    data["validation"] = {"other": str(tmp_path / "other/corpus")}
    whole = make_gpt(tmp_path / "whole", BigramTrainer, **make_changes(texts) | {"config.data": data})
    whole()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    manifests = [read_newest_manifest(make_gpt(tmp_path / name).store) for name in ("run", "whole")]
    assert len({manifest.identity["config.data"] for manifest in manifests if manifest is not None}) == 1


BAD_INPUTS = [
    ({"tokenise": {"tokenizer": BPE, "seperator": 0}}, "config.data.tokenise.seperator: unknown key"),
    ({"tokenise": {"separator": 0}}, "config.data.tokenise: missing key tokenizer"),
    ({"tokenise": {"tokenizer": {"kind": "bpe", "vocabulary_size": 9}}}, "tokenise.tokenizer.vocabulary_size: got 9"),
    ({"tokenise": {"tokenizer": BPE, "output": "x"}}, "tokenise.output: the run sets it"),
    ({"tokenise": {"tokenizer": {"kind": "hf", "file": "no.json"}}}, "config.data.tokenise.tokenizer: no.json: does"),
    ({"tokenizer": "characters"}, "tokenizer=characters: nothing reads it beside tokenise"),
    ({"document_separator": "nul"}, "document_separator=nul: nothing reads it beside tokenise"),
    ({"options": {"column": "x"}}, "options.column: nothing reads it beside tokenise"),
    ({"dtype": "uint16"}, "dtype=uint16: nothing reads it beside tokenise"),
    ({"source": "tests.support.arrays:Digits"}, "is a class, and tokenise needs text"),
    ({"source": "none/*.jsonl"}, "config.data.source: no file matches"),
    ({"source": "tokens.bin"}, "config.data.source: no file matches"),
    ({"validation": {"other": "none.jsonl"}}, "config.data.validation.other.source: no file matches"),
    ({"source": "hf://models/a/b"}, "config.data.source: hf://models/a/b: needs hf://datasets/OWNER/NAME/PATH"),
    ({"options": {"field": "body"}}, "web.jsonl:1: has no 'body'; it has 'text', 'code'"),
    ({"sequence_length": None}, "missing key sequence_length"),
]


@pytest.mark.parametrize(("data", "message"), BAD_INPUTS)
def test_bad_input_is_one_line_with_the_key_of_the_spec(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    changes = make_single(write_texts(tmp_path / "texts"))
    with pytest.raises(InvalidError) as caught:
        make_gpt(tmp_path / "run", **changes | {"config.data": changes["config.data"] | data})()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("index.json"))


def test_text_is_evaluated_with_the_tokenizer_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "texts")
    make_gpt(tmp_path / "run", BigramTrainer, **make_single(texts, job="tests.support.bigram:BigramTrainer"))()
    capsys.readouterr()

    def evaluate(source: str) -> dict[str, Any]:
        words = ["evaluate", str(tmp_path / "run"), "--trust", "tests.support.bigram", "--json", "--data", source]
        assert run_command(words) == 0
        return dict(json.loads(capsys.readouterr().out))

    text = str(texts / "web.jsonl")
    assert evaluate(text) == evaluate(str(tmp_path / "run/tokenise/train/corpus"))
    assert evaluate(f"{{source: {text}, options: {{field: code}}}}") != evaluate(text)
    with pytest.raises(
        InvalidError, match=r"^--data \S*/wed\.jsonl: no file matches .*; did you mean \S*/web\.jsonl\?"
    ):
        evaluate(str(texts / "wed.jsonl"))


def test_a_resolved_spec_of_a_run_with_a_small_text_makes_the_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The text yields fewer ids than the tokenizer asks for, and the resolved spec has their number."""
    changes = make_single(write_texts(tmp_path / "texts"))
    tokenise = {"tokenizer": BPE | {"vocabulary_size": 20_000}, "separator": SEPARATOR}
    changes["config.data"] = changes["config.data"] | {"tokenise": tokenise}
    make_gpt(tmp_path / "run", **changes, **{"config.model.vocabulary_size": "auto"})()
    size = read_newest_manifest(LocalStore(tmp_path / "run")).identity["config.model.vocabulary_size"]
    assert 256 < size < 20_000
    run = make_gpt(tmp_path / "again", **changes, **{"config.model.vocabulary_size": size})
    run()
    assert "the run ends before its first step: use a vocabulary of at least that, or auto" in caplog.text
    assert run.step == run.total_steps
    too_small = make_gpt(tmp_path / "small", **changes, **{"config.model.vocabulary_size": size - 1})
    with pytest.raises(InvalidError, match=rf"{size - 1}"):
        too_small()


def test_a_fork_of_a_step_that_was_never_saved_is_refused_before_work(tmp_path: Path) -> None:
    changes = make_single(write_texts(tmp_path / "texts"))
    make_gpt(tmp_path / "parent", **changes)()
    fork = {"run": str(tmp_path / "parent"), "step": 2000}
    with pytest.raises(InvalidError, match=r"checkpoint\.fork_from: .* step 2000 was never saved"):
        make_gpt(tmp_path / "run", **changes, **{"checkpoint.fork_from": fork})()
    assert not (tmp_path / "run" / "tokenise").exists()


def test_a_fork_with_an_unlisted_change_is_refused_before_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = make_single(write_texts(tmp_path / "texts"))
    with caplog.at_level(logging.INFO, "runner"):
        make_gpt(tmp_path / "parent", **changes)()
    # The text and the run are a chain, whose end alone is the end of the command.
    for words in ("done at step", "run the same command again"):
        assert [words in line for line in caplog.messages[-5:]].count(True) == 1
        assert sum(words in line for line in caplog.messages) == 1
    fork = {"run": str(tmp_path / "parent"), "step": STEPS, "changes": ["config.data", "config.train.total_steps"]}
    more = {"checkpoint.fork_from": fork, "config.train.total_steps": 2 * STEPS}
    rate = {"config.optimizer.learning_rate": 0.5}
    with pytest.raises(InvalidError, match=r"config\.optimizer\.learning_rate: the parent has .*, this spec 0\.5"):
        make_gpt(tmp_path / "run", **changes | more | rate)()
    assert not (tmp_path / "run").exists()
    listed = fork | {"changes": [*fork["changes"], "config.optimizer.learning_rate"]}
    make_gpt(tmp_path / "run", **changes | more | rate | {"checkpoint.fork_from": listed})()
    assert read_newest_manifest(LocalStore(tmp_path / "run")).step == 2 * STEPS


def test_a_small_vocabulary_and_a_strange_directory_are_refused_before_work(tmp_path: Path) -> None:
    changes = make_single(write_texts(tmp_path / "texts"))
    with pytest.raises(InvalidError, match=r"config\.model\.vocabulary_size: is 200, and .* has 280 ids"):
        make_gpt(tmp_path / "run", **changes, **{"config.model.vocabulary_size": 200})()
    stages = [{"from_step": 2, "set": {"data.source": "x"}}]
    with pytest.raises(InvalidError, match=r"config\.stages\.0\.set\.data\.source: a stage cannot name another text"):
        make_gpt(tmp_path / "run", **changes, **{"config.stages": stages})
    stages = [{"from_step": 2, "set": {"data.mixture": [{"name": "other", "source": "x"}]}}]
    validation = {"config.data": changes["config.data"] | {"validation": {"other": "y"}}}
    with pytest.raises(InvalidError, match=r"config\.data\.validation\.other: names another text than before"):
        make_gpt(tmp_path / "run", **changes | validation, **{"config.stages": stages})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tokenise").write_text("")
    with pytest.raises(InvalidError, match=r"job\.json is below a file"):
        make_gpt(tmp_path / "run", **changes)()


CHANGED = [
    ({"tokenise": {"tokenizer": BPE, "separator": 0}}, "config.data.tokenise.separator: is 0, and the corpus in"),
    ({"tokenise": {"tokenizer": BPE | {"vocabulary_size": 281}}}, "config.data.tokenise.tokenizer.vocabulary_size: is"),
    ({"source": "elsewhere/web.jsonl"}, "config.data.source: is 'elsewhere/web.jsonl', and the corpus in"),
]


def test_a_changed_key_is_refused_once_the_corpus_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts")
    changes, directory = make_single(texts), tmp_path / "run"
    findings = Findings()
    found = check_data(make_gpt(directory, **changes), findings, 1)
    assert (found.is_found, found.can_build_step, findings.problems) == (False, True, [])
    assert "the text of train is tokenised at the first start" in findings.warnings[0]
    assert not directory.exists()
    with pytest.raises(PreemptedError, match="the text is tokenised"):
        make_gpt(directory, **changes)(stop=StopWhen(lambda: (directory / "tokenise/train/result.json").exists()))
    files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    shutil.rmtree(texts)
    for data, message in CHANGED:
        with pytest.raises(InvalidError) as caught:
            make_gpt(directory, **changes | {"config.data": changes["config.data"] | data})()
        assert message in str(caught.value)
        assert str(directory / "tokenise/train") in str(caught.value)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == files
    # Before the run itself has begun, the status is that of its text, and a supervisor sees progress.
    capsys.readouterr()
    assert run_command(["status", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "the text of the run is tokenised, before it trains" in shown
    assert str(directory / "tokenise/train") in shown.replace("\n", "")
    (tmp_path / "spec.yaml").write_text(json.dumps(make_gpt_document(directory, **changes)))
    progress = read_progress(str(tmp_path / "spec.yaml"), [])
    assert (progress.newest_step, progress.newest_attempt, len(progress.commits)) == (None, 1, 1)


def test_a_data_set_of_the_hub_is_read_at_the_commit_where_the_corpus_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(bucket, "CALL_SECONDS", 0.5)
    texts, directory = write_texts(tmp_path / "texts"), tmp_path / "run"
    files = {f"data/{path.name}": path.read_bytes() for path in texts.iterdir()}
    with start_hub(monkeypatch) as hub:
        hub.datasets["owner/texts"] = [files]
        first, _ = hub.find_commit("owner/texts", "main")
        for source, message in (
            ("hf://datasets/owner/gone/data/web.jsonl", "owner/gone@main: 404: "),
            ("hf://datasets/owner/texts@v2/data/web.jsonl", "owner/texts@v2: 404: "),
            (f"hf://datasets/owner/texts@{'0' * 40}/data/web.jsonl", "404: "),
            ("hf://datasets/owner/texts/data/none.jsonl", "no file matches"),
        ):
            with pytest.raises(InvalidError, match=r"config\.data\.source: ") as caught:
                make_gpt(directory, **make_single(texts, **{"config.data.source": source}))()
            assert message in str(caught.value)
        changes = make_single(texts, **{"config.data.source": "hf://datasets/owner/texts/data/w*.jsonl"})
        hub.fault = lambda number, line: 503
        with pytest.raises(StorageError, match="503"):
            make_gpt(directory, **changes)()
        hub.fault = lambda number, line: None
        run = make_gpt(directory, **changes)
        with pytest.raises(PreemptedError):
            run(stop=StopAfter(get_job(run, "train"), 1))
        # The branch moves on, and the job does not.
        hub.datasets["owner/texts"].append({"data/web.jsonl": b"{}\n"})
        with pytest.raises(PreemptedError, match="the text is tokenised"):
            make_gpt(directory, **changes)(stop=StopWhen(lambda: (directory / "tokenise/train/result.json").exists()))
    corpus = directory / "tokenise/train/corpus"
    (label, *_) = json.loads((corpus / "sources.json").read_text())["files"]
    assert label[0] == f"hf://datasets/owner/texts@{first}/data/web.jsonl"
    local = make_gpt(tmp_path / "local", **make_single(texts))
    with pytest.raises(PreemptedError, match="the text is tokenised"):
        local(stop=StopWhen(lambda: (tmp_path / "local/tokenise/train/result.json").exists()))
    assert (corpus / "index.json").read_bytes() == (tmp_path / "local/tokenise/train/corpus/index.json").read_bytes()


def is_begun(directory: Path, name: str) -> bool:
    """Return True if a text has a finished piece."""
    return any((directory / f"tokenise/{name}/corpus").glob("[0-9]*.json"))


KILLS = {
    "in the first text": lambda directory: is_begun(directory, "web"),
    "between two texts": lambda directory: (directory / "tokenise/web/result.json").exists(),
    "in another text": lambda directory: is_begun(directory, "code"),
    "before training": lambda directory: (directory / "tokenise/other/result.json").exists(),
    "in training": lambda directory: (directory / "checkpoints/1/manifest.json").exists(),
}


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2])
def test_kills_anywhere_change_no_bit(tmp_path: Path, num_processes: int) -> None:
    texts = write_texts(tmp_path / "texts")
    more = {"config.train.total_steps": 12, "checkpoint.every_steps": 1, "checkpoint.keep_last": 20}
    jobs = {}
    for name in ("whole", "run"):
        spec = tmp_path / f"{name}.yaml"
        spec.write_text(json.dumps(make_gpt_document(tmp_path / name, **make_changes(texts, **more))))
        jobs[name] = Job(str(spec), tmp_path / name)
    # The corpus is the same for any number of hosts, and so are the rows of a mesh that is.
    jobs["whole"].launch(num_processes).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    job = jobs["run"]
    for what, happens in KILLS.items():
        attempts = job.start_processes(num_processes)
        kill_all_when(attempts, lambda happens=happens: happens(job.directory), what)
    job.launch(num_processes).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert job.outcome() == jobs["whole"].outcome()
    corpora = [sorted((tmp_path / name / "tokenise").glob("*/corpus/[0-9]*")) for name in ("whole", "run")]
    assert len(corpora[0]) > 10
    assert [path.read_bytes() for path in corpora[0]] == [path.read_bytes() for path in corpora[1]]
