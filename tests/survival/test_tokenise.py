"""Tokenise as processes that are struck: the same bytes and the same index as a job that nobody disturbed."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_process import (
    DEADLINE_SECONDS,
    SMALL_GPT_OPTIONS,
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    run_runner,
)
from tests.support.simulated_devices import environment
from tests.support.tokenise_inputs import (
    DOCUMENTS,
    SEPARATOR,
    make_tokenise_document,
    make_tokenise_job,
    read_corpus,
    read_corpus_files,
    write_text_files,
)

NUM_KILLS = 30
LONGEST_START_SECONDS = 3.0


def make_job(tmp_path: Path, num_documents: int, **more: Any) -> Job:
    """A job of many small pieces, whose tokenizer is trained first, and beside it the corpus that it should make."""
    changes: dict[str, Any] = {
        "config.source": write_text_files(tmp_path / "in", (DOCUMENTS * 40)[:num_documents]),
        "config.tokenizer": {"kind": "bpe", "vocabulary_size": 280},
        "config.separator": SEPARATOR,
        "config.shard_bytes": 200,
        "checkpoint.every_steps": 50,
        "deadlines.start_seconds": 20.0,  # a host that was killed before it came is waited for so long
        **more,
    }
    make_tokenise_job(tmp_path / "whole", **changes)()
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(make_tokenise_document(tmp_path / "run", **changes)))
    return Job(str(spec), tmp_path / "run")


def num_pieces(job: Job) -> int:
    """Those that have a record."""
    return len(list((job.directory / "corpus").glob("[0-9]*.json")))


def assert_same_corpus(job: Job) -> None:
    """What it has made is what the undisturbed job made."""
    whole = job.directory.parent / "whole"
    found, wanted = read_corpus_files(job.directory / "corpus"), read_corpus_files(whole / "corpus")
    assert sorted(found) == sorted(wanted)
    assert found == wanted
    assert job.result() == json.loads((whole / "result.json").read_bytes())


@pytest.mark.soak
def test_kills_change_no_byte_and_a_fenced_job_stops(tmp_path):
    job = make_job(tmp_path, 240)
    killed = job.start()
    killed.wait_until(lambda: num_pieces(job) > 5, "five pieces")
    killed.kill()
    zombie, before = job.start(), num_pieces(job)
    zombie.wait_until(lambda: num_pieces(job) > before + 5, "five pieces more")
    zombie.freeze()
    spec = json.loads(Path(job.spec).read_text())
    make_tokenise_job(job.directory, **{key: spec[key] for key in ("config", "checkpoint", "deadlines")})()
    assert_same_corpus(job)
    zombie.thaw()
    zombie.expect(1)
    assert "has taken over" in zombie.output
    assert_same_corpus(job)


@pytest.mark.soak
def test_kills_on_any_number_of_hosts_change_no_byte(tmp_path):
    job, chance = make_job(tmp_path, 4800), random.Random(4)
    total = num_pieces(Job(job.spec, tmp_path / "whole"))
    for kill in range(NUM_KILLS):
        attempts, done = job.start_processes((1, 3, 2)[kill % 3]), num_pieces(job)
        strike(job, attempts, chance, done + (total - done) // (NUM_KILLS + 1 - kill))
        if (job.directory / "result.json").exists():
            break
    assert kill > NUM_KILLS // 2, "the job ended too early"
    assert num_pieces(job) > 10
    last = job.launch(2, max_restarts=0)
    last.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert_same_corpus(job)


@pytest.mark.soak
def test_kills_change_no_byte_of_a_deduplicated_shuffled_corpus(tmp_path):
    """Every document is there forty times, so that nearly all of the work is to find that out."""
    job, chance = make_job(tmp_path, 4800, **{"config.shuffle": True, "config.deduplicate": True}), random.Random(7)
    assert len(read_corpus(tmp_path / "whole/corpus")) == len(DOCUMENTS)
    for kill in range(12):
        attempts = job.start_processes((1, 3, 2)[kill % 3])
        time.sleep(chance.uniform(1.0, 8.0))
        for attempt in attempts if chance.random() < 0.7 else attempts[:1]:
            attempt.kill()
        for attempt in attempts:
            assert attempt.wait(DEADLINE_SECONDS) in (-9, 76, 0), attempt.report("ended otherwise")
        if (job.directory / "result.json").exists():
            break
    last = job.launch(2, max_restarts=0)
    last.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert_same_corpus(job)


@pytest.mark.soak
def test_three_hosts_tokenise_and_train_on_one_document(tmp_path: Path) -> None:
    source = write_text_files(tmp_path / "in", ["all that there is " * 100])
    jobs = [Job("specs/tokenise_stdlib.yaml", tmp_path / name, (f"config.source={source}",)) for name in ("one", "few")]
    jobs[0].finish()
    jobs[1].launch(3).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert read_corpus_files(jobs[1].directory / "corpus") == read_corpus_files(jobs[0].directory / "corpus")
    data = (f"config.data.source={jobs[1].directory / 'corpus'}", "config.data.packing=documents")
    options = (*SMALL_GPT_OPTIONS, *data, "config.data.validation_fraction=0", "config.train.total_steps=3")
    options = (*options, "config.train.global_batch_examples=6", "config.schedule.warmup_steps=1")
    Job("specs/gpt_nano.yaml", tmp_path / "train", options).launch(3).expect(0, WHOLE_RUN_DEADLINE_SECONDS)


@pytest.mark.soak
def test_the_shipped_spec_runs_under_launch_and_verify_resume(tmp_path: Path) -> None:
    source = write_text_files(tmp_path / "in", DOCUMENTS * 40)
    small = (f"config.source={source}", "config.tokenizer.vocabulary_size=280", "config.shard_bytes=200")
    alone, pair = (Job("specs/tokenise_stdlib.yaml", tmp_path / name, small) for name in ("alone", "pair"))
    alone.finish()
    pair.launch(2).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert read_corpus_files(pair.directory / "corpus") == read_corpus_files(alone.directory / "corpus")
    assert pair.result() == alone.result()
    output = tmp_path / "of the user"
    arguments = alone.with_options(f"config.output={output}").arguments
    counts = ("--steps", "1000", "--kills", "4", "--processes", "2")
    code, said = run_runner(environment(1), "verify-resume", *arguments, *counts, deadline_seconds=DEADLINE_SECONDS)
    assert code == 0, said
    assert "SAME BITS after 4 kills: every leaf at steps 142, 284, 426, 568, 710, 852, 994, 1000" in said
    assert not output.exists()


def strike(job: Job, attempts: list[Attempt], chance: random.Random, until_pieces: int) -> None:
    """kill -9 to all processes of a job, or to one, and then the others end by themselves with 76, or were done before.

    That is while they start, in one attempt of four, or when they have made some pieces.
    """
    victims = [chance.choice(attempts)] if chance.random() < 0.2 else attempts
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, LONGEST_START_SECONDS))
    else:
        attempts[0].wait_until_or_exit(lambda: num_pieces(job) > until_pieces, "more pieces")
    for attempt in victims:
        attempt.kill()
    for attempt in attempts:
        assert attempt.wait(DEADLINE_SECONDS) in (-9, 76, 0), attempt.report("ended otherwise")
