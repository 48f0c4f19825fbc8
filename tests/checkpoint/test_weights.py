"""Whoever only looks at a run reads its weights, on a disk and in a bucket, beside it, and changes nothing."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.counter import Counter
from runner import open_checkpoint
from runner.checkpoint import weights
from runner.checkpoint.inspect import VerifyDepth, format_report
from runner.checkpoint.manifest import seal
from runner.cli.app import run_command
from runner.errors import EXIT_DONE, EXIT_FAILED, InvalidError
from runner.run.fence import Fence
from runner.spec import dump_spec
from runner.storage import LocalStore, Store, compute_crc32c, open_store, parse_json
from tests.checkpoint.test_checkpoint import Attempt
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import make_counter

URL = "gs://bucket/run"


class TrustedDriver(MemoryDriver):
    """A service that reports the digest of what was sent, whatever has become of it; it notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, str] = {}
        self.verbs: set[str] = set()
        self.before = lambda verb, key: self.verbs.add(verb)

    def put(self, key: str, content: bytes, version: str | None) -> str:
        self.sent[key] = compute_crc32c(content)
        return super().put(key, content, version)

    def crc32c(self, key: str) -> str | None:
        return self.sent[key]

    def rot(self, name: str) -> None:
        """A bit of an object turns over."""
        content, version = self.objects[f"run/{name}"]
        self.objects[f"run/{name}"] = (content[:-1] + bytes([content[-1] ^ 4]), version)


def values(seed: int) -> dict[str, Any]:
    """A state with leaves of several types."""
    generator = np.random.default_rng(seed)
    params = {
        "dense": {"kernel": jnp.asarray(generator.normal(size=(4, 6)), jnp.bfloat16)},
        "scale": jnp.asarray(generator.normal(size=8), jnp.float16),
        "table": [jnp.arange(3, dtype=jnp.int8), jnp.array([True, False])],
    }
    return {"step": jnp.int32(seed), "params": params, "opt_state": {"mu": jnp.zeros((4, 6))}}


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Steps 1 and 2 of a run."""
    store: Store = LocalStore(tmp_path / "run")
    if request.param == "bucket":
        store = make_memory_bucket(TrustedDriver())
        monkeypatch.setattr(weights, "open_store", lambda text: store if text == URL else open_store(text))
    attempt = Attempt(store, tmp_path / "staging")
    attempt.where = URL if request.param == "bucket" else str(tmp_path / "run")
    for step in (1, 2):
        attempt.save(str(step), values(step))
        assert attempt.saver.wait_until_finished()
    attempt.attempt.background_writer.flush()
    store.write("spec.yaml", dump_spec(make_counter(tmp_path / "other").resolved_spec()).encode())
    return attempt


def piece(run: Attempt, step: int) -> str:
    """The largest file that holds arrays; where each leaf has its own, of the weights."""
    sizes = {name: size for name, size in run.files(f"checkpoints/{step}").items() if name.startswith("arrays")}
    sizes = {name: size for name, size in sizes.items() if "/params." in name} or sizes
    return f"checkpoints/{step}/{max(sizes, key=lambda name: sizes[name])}"


def same(found: Any, seed: int) -> bool:
    params = values(seed)["params"]
    params["table"] = {"0": params["table"][0], "1": params["table"][1]}
    pairs = jax.tree.map(
        lambda a, b: (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes()), found, {"params": params}
    )
    return all(jax.tree.leaves(pairs))


def test_the_weights_of_the_newest_or_of_any_step_are_those_that_were_saved(run: Attempt) -> None:
    found, spec = open_checkpoint(run.where)
    assert same(found, 2)
    assert spec.name == "count"
    assert spec.config["width"] == 64
    for chosen in (
        open_checkpoint(run.where, 1),
        open_checkpoint(run.where, "1"),
        open_checkpoint(f"{run.where}/checkpoints/1"),
    ):
        assert same(chosen[0], 1)
    assert all(leaf.devices() == {jax.local_devices()[0]} for leaf in jax.tree.leaves(found))


def test_looking_claims_and_changes_nothing(run: Attempt) -> None:
    before, attempts = run.content(), Fence(run.store).find_newest()
    if run.store.root is None:
        run.store._driver.verbs.clear()
    open_checkpoint(run.where)
    format_report(run.store, VerifyDepth.BITS)
    if run.store.root is None:
        assert run.store._driver.verbs <= {"get", "list"}
    assert run.content() == before
    assert Fence(run.store).find_newest() == attempts
    run.fence.check()


def test_of_a_damaged_newest_step_the_one_before_it_is_opened_and_the_damage_told(
    run: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    run.flip_bit(piece(run, 2))
    assert same(open_checkpoint(run.where)[0], 1)
    assert "checkpoint 2 is not good: " in capsys.readouterr().err
    with pytest.raises(InvalidError, match="CRC-32C"):
        open_checkpoint(run.where, 2)
    run.flip_bit(piece(run, 1))
    with pytest.raises(InvalidError, match=r"no good checkpoint is here; checkpoint 2 is not good: .*; checkpoint 1"):
        open_checkpoint(run.where)


def test_bits_that_were_lost_before_the_sum_was_taken_are_found(run: Attempt) -> None:
    forge(run)
    with pytest.raises(InvalidError, match=r"the bits of params\.dense\.kernel are not those that were saved"):
        open_checkpoint(run.where, 2)


def test_what_is_not_there_is_refused(run: Attempt, tmp_path: Path) -> None:
    for where, step, message in (
        (run.where, 7, "7: no manifest.json: it was never committed"),
        (f"{run.where}/checkpoints/1", 2, "names a checkpoint already; got step=2"),
        (tmp_path / "nothing", "newest", r"no spec\.yaml is here"),
    ):
        with pytest.raises(InvalidError, match=message):
            open_checkpoint(where, step)
    assert not (tmp_path / "nothing").exists()


def test_a_step_that_the_run_deletes_while_it_is_read_is_no_damage(
    run: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention takes step 2 away, the newest when it was listed, and step 3 has been committed."""
    original = weights.read_leaves

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(weights, "read_leaves", original)
        run.save("3", values(3))
        assert run.saver.wait_until_finished()
        for step in (1, 2):
            run.store.remove_tree(f"checkpoints/{step}")
        return original(*arguments)

    monkeypatch.setattr(weights, "read_leaves", overtaken)
    assert same(open_checkpoint(run.where)[0], 3)


class Watched(Counter):
    """A run that somebody looks at after each step."""

    looks = 0

    def save_or_stop(self) -> None:
        super().save_or_stop()
        self.checkpointer.wait_until_finished()
        if self.step % 10 == 5 and self.step > 10:
            found, _ = open_checkpoint(self.store.root)
            assert int(found["count"]) == self.step // 10 * 10
            self.looks += 1


def test_a_living_run_is_looked_at_and_not_fenced(tmp_path: Path) -> None:
    job = make_counter(tmp_path / "run", Watched, **{"checkpoint.keep_last": 1})
    job()
    assert job.looks == 3
    assert job.attempt.fence.find_newest() == 1


def test_types_of_64_bits_stay_what_they_are(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        run = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
        state = {"params": {"a": jnp.arange(5, dtype=jnp.int64) << 40, "b": jnp.float64(1) / 3}}
        run.save("1", state)
        assert run.saver.wait_until_finished()
    run.store.write("spec.yaml", dump_spec(make_counter(tmp_path / "other").resolved_spec()).encode())
    found, _ = open_checkpoint(tmp_path / "run")
    assert {name: str(leaf.dtype) for name, leaf in found["params"].items()} == {"a": "int64", "b": "float64"}
    assert np.asarray(found["params"]["a"]).tolist() == [number << 40 for number in range(5)]


# The same checks without a job: `checkpoints --verify` and `--deep`.


def forge(run: Attempt) -> None:
    """Files and their sums agree, and still the bits of a leaf are not those that its digest says."""
    record = run.manifest(2)
    record.pop("digest")
    record["leaves"]["params.dense.kernel"]["digest"] = run.manifest(1)["leaves"]["params.dense.kernel"]["digest"]
    run.store.write("checkpoints/2/manifest.json", seal(record))
    assert parse_json(run.store.read("checkpoints/2/manifest.json"))


def told(run: Attempt, depth: VerifyDepth) -> tuple[str, int]:
    lines, code = format_report(run.store, depth)
    return "\n".join(lines), code


def test_all_good_is_told_as_deep_as_it_was_checked(run: Attempt) -> None:
    for depth, state in ((VerifyDepth.MANIFEST, "committed"), (VerifyDepth.FILES, "good"), (VerifyDepth.BITS, "good")):
        text, code = told(run, depth)
        assert code == EXIT_DONE
        assert text.count(f"  {state}  ") == 2


def test_what_a_bucket_itself_has_lost_is_found_by_reading_every_byte_back(tmp_path: Path) -> None:
    driver = TrustedDriver()
    run = Attempt(make_memory_bucket(driver), tmp_path / "staging")
    run.save("2", values(2))
    assert run.saver.wait_until_finished()
    driver.rot(piece(run, 2))
    assert told(run, VerifyDepth.FILES)[1] == EXIT_DONE
    text, code = told(run, VerifyDepth.BITS)
    assert code == EXIT_FAILED
    assert "does not match its CRC-32C" in text


def test_bits_that_do_not_give_their_fingerprint_are_found_by_computing_it_anew(run: Attempt) -> None:
    forge(run)
    assert told(run, VerifyDepth.FILES)[1] == EXIT_DONE
    text, code = told(run, VerifyDepth.BITS)
    assert code == EXIT_FAILED
    assert "the fingerprint is not that of the leaves" in text


def test_a_copy_of_what_orbax_wrote_is_read_back_from_a_bucket(tmp_path: Path) -> None:
    origin = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
    origin.save_all(1)
    bucket = make_memory_bucket()
    for name in origin.files("checkpoints"):
        bucket.write(f"checkpoints/{name}", origin.store.read(f"checkpoints/{name}"))
    lines, code = format_report(bucket, VerifyDepth.BITS)
    assert code == EXIT_DONE, lines


def test_the_command_looks_as_deep_as_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
    for step in (1, 2):
        run.save(str(step), values(step))
        assert run.saver.wait_until_finished()
    forge(run)
    for options, code in (([], EXIT_DONE), (["--verify"], EXIT_DONE), (["--deep"], EXIT_FAILED)):
        assert run_command(["checkpoints", str(tmp_path / "run"), *options]) == code
    assert "DAMAGED" in capsys.readouterr().out
