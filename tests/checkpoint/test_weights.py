"""Read-only access to the weights of a run, on disk and in a bucket, also while it runs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.counter import Counter
from runner import open_checkpoint
from runner.attempts.fence import Fence
from runner.checkpoint import inspect
from runner.checkpoint.inspect import VerifyDepth, format_report
from runner.checkpoint.manifest import seal
from runner.cli.app import run_command
from runner.errors import EXIT_DONE, EXIT_FAILED, InvalidError
from runner.spec import dump_spec
from runner.storage import LocalStore, Store, compute_crc32c, open_store, parse_json
from tests.checkpoint.test_checkpoint import Attempt
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import make_counter

URL = "gs://bucket/run"


class BitRotDriver(MemoryDriver):
    """A service that reports the digest of the uploaded bytes even after they have rotted, and records its calls."""

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
        """Flip a bit of a stored object."""
        content, version = self.objects[f"run/{name}"]
        self.objects[f"run/{name}"] = (content[:-1] + bytes([content[-1] ^ 4]), version)


def make_state(seed: int) -> dict[str, Any]:
    """Return a state with leaves of several types."""
    generator = np.random.default_rng(seed)
    params = {
        "dense": {"kernel": jnp.asarray(generator.normal(size=(4, 6)), jnp.bfloat16)},
        "scale": jnp.asarray(generator.normal(size=8), jnp.float16),
        "table": [jnp.arange(3, dtype=jnp.int8), jnp.array([True, False])],
    }
    return {"step": jnp.int32(seed), "params": params, "opt_state": {"mu": jnp.zeros((4, 6))}}


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A run with steps 1 and 2."""
    store: Store = LocalStore(tmp_path / "run")
    if request.param == "bucket":
        store = make_memory_bucket(BitRotDriver())
        monkeypatch.setattr(inspect, "open_store", lambda text: store if text == URL else open_store(text))
    attempt = Attempt(store, tmp_path / "staging")
    attempt.where = URL if request.param == "bucket" else str(tmp_path / "run")
    for step in (1, 2):
        attempt.save(str(step), make_state(step))
        assert attempt.saver.wait_until_finished()
    attempt.attempt.background_writer.flush()
    store.write("spec.yaml", dump_spec(make_counter(tmp_path / "other").resolved_spec()).encode())
    return attempt


def find_largest_file(run: Attempt, step: int) -> str:
    """Return the largest file of arrays; if each leaf has its own file, of the parameters."""
    sizes = {name: size for name, size in run.files(f"checkpoints/{step}").items() if name.startswith("arrays")}
    sizes = {name: size for name, size in sizes.items() if "/params." in name} or sizes
    return f"checkpoints/{step}/{max(sizes, key=lambda name: sizes[name])}"


def equals_state(found: Any, seed: int) -> bool:
    params = make_state(seed)["params"]
    params["table"] = {"0": params["table"][0], "1": params["table"][1]}
    pairs = jax.tree.map(
        lambda a, b: (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes()), found, {"params": params}
    )
    return all(jax.tree.leaves(pairs))


def test_weights_of_the_newest_or_a_given_step_are_those_saved(run: Attempt) -> None:
    found, spec = open_checkpoint(run.where)
    assert equals_state(found, 2)
    assert spec.name == "count"
    assert spec.config["width"] == 64
    for chosen in (
        open_checkpoint(run.where, 1),
        open_checkpoint(run.where, "1"),
        open_checkpoint(f"{run.where}/checkpoints/1"),
    ):
        assert equals_state(chosen[0], 1)
    assert all(leaf.devices() == {jax.local_devices()[0]} for leaf in jax.tree.leaves(found))


def test_opening_a_checkpoint_is_read_only(run: Attempt) -> None:
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


def test_a_damaged_newest_step_is_reported_and_the_previous_one_opened(
    run: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    run.flip_bit(find_largest_file(run, 2))
    assert equals_state(open_checkpoint(run.where)[0], 1)
    assert "checkpoint 2 is not good: " in capsys.readouterr().err
    with pytest.raises(InvalidError, match="CRC-32C"):
        open_checkpoint(run.where, 2)
    run.flip_bit(find_largest_file(run, 1))
    with pytest.raises(InvalidError, match=r"no good checkpoint is here; checkpoint 2 is not good: .*; checkpoint 1"):
        open_checkpoint(run.where)


def test_damage_before_the_checksum_is_detected(run: Attempt) -> None:
    forge(run)
    with pytest.raises(InvalidError, match=r"the bits of params\.dense\.kernel are not those that were saved"):
        open_checkpoint(run.where, 2)


def test_missing_checkpoints_are_rejected(run: Attempt, tmp_path: Path) -> None:
    for where, step, message in (
        (run.where, 7, "got step 7, has 1, 2; needs one of them, newest or best"),
        (f"{run.where}/checkpoints/1", 2, "names a checkpoint already; got step=2"),
        (tmp_path / "nothing", "newest", r"no spec\.yaml is here"),
    ):
        with pytest.raises(InvalidError, match=message):
            open_checkpoint(where, step)
    assert not (tmp_path / "nothing").exists()


def test_a_step_deleted_while_it_is_read_is_not_reported_as_damage(
    run: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes step 2, the newest one when it was listed, after step 3 was committed."""
    original = inspect.read_leaves

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(inspect, "read_leaves", original)
        run.save("3", make_state(3))
        assert run.saver.wait_until_finished()
        for step in (1, 2):
            run.store.remove_tree(f"checkpoints/{step}")
        return original(*arguments)

    monkeypatch.setattr(inspect, "read_leaves", overtaken)
    assert equals_state(open_checkpoint(run.where)[0], 3)


class WatchedCounter(Counter):
    """A job whose weights are read after its saves."""

    looks = 0

    def save_or_stop(self) -> None:
        super().save_or_stop()
        self.checkpointer.wait_until_finished()
        if self.step % 10 == 5 and self.step > 10:
            found, _ = open_checkpoint(self.store.root)
            assert int(found["count"]) == self.step // 10 * 10
            self.looks += 1


def test_reading_a_running_job_does_not_fence_it(tmp_path: Path) -> None:
    job = make_counter(tmp_path / "run", WatchedCounter, **{"checkpoint.keep_last": 1})
    job()
    assert job.looks == 3
    assert job.attempt.fence.find_newest() == 1


def test_64_bit_types_are_kept(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        run = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
        state = {"params": {"a": jnp.arange(5, dtype=jnp.int64) << 40, "b": jnp.float64(1) / 3}}
        run.save("1", state)
        assert run.saver.wait_until_finished()
    run.store.write("spec.yaml", dump_spec(make_counter(tmp_path / "other").resolved_spec()).encode())
    found, _ = open_checkpoint(tmp_path / "run")
    assert {name: str(leaf.dtype) for name, leaf in found["params"].items()} == {"a": "int64", "b": "float64"}
    assert np.asarray(found["params"]["a"]).tolist() == [number << 40 for number in range(5)]


# Verification without a job: `checkpoints --verify` and `--deep`.


def forge(run: Attempt) -> None:
    """Change the digest of a leaf in the manifest, with matching files and checksums."""
    record = run.manifest(2)
    record.pop("digest")
    record["leaves"]["params.dense.kernel"]["digest"] = run.manifest(1)["leaves"]["params.dense.kernel"]["digest"]
    run.store.write("checkpoints/2/manifest.json", seal(record))
    assert parse_json(run.store.read("checkpoints/2/manifest.json"))


def verify_run(run: Attempt, depth: VerifyDepth) -> tuple[str, int]:
    lines, code = format_report(run.store, depth)
    return "\n".join(lines), code


def test_verification_reports_its_depth(run: Attempt) -> None:
    for depth, state in ((VerifyDepth.MANIFEST, "committed"), (VerifyDepth.FILES, "good"), (VerifyDepth.BITS, "good")):
        text, code = verify_run(run, depth)
        assert code == EXIT_DONE
        assert text.count(f"  {state}  ") == 2


def test_bit_rot_in_a_bucket_is_found_by_deep_verification(tmp_path: Path) -> None:
    driver = BitRotDriver()
    run = Attempt(make_memory_bucket(driver), tmp_path / "staging")
    run.save("2", make_state(2))
    assert run.saver.wait_until_finished()
    driver.rot(find_largest_file(run, 2))
    assert verify_run(run, VerifyDepth.FILES)[1] == EXIT_DONE
    text, code = verify_run(run, VerifyDepth.BITS)
    assert code == EXIT_FAILED
    assert "does not match its CRC-32C" in text


def test_a_wrong_fingerprint_is_found_by_deep_verification(run: Attempt) -> None:
    forge(run)
    assert verify_run(run, VerifyDepth.FILES)[1] == EXIT_DONE
    text, code = verify_run(run, VerifyDepth.BITS)
    assert code == EXIT_FAILED
    assert "the fingerprint is not that of the leaves" in text


def test_a_copy_of_an_orbax_checkpoint_verifies_in_a_bucket(tmp_path: Path) -> None:
    origin = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
    origin.save_all(1)
    bucket = make_memory_bucket()
    for name in origin.files("checkpoints"):
        bucket.write(f"checkpoints/{name}", origin.store.read(f"checkpoints/{name}"))
    lines, code = format_report(bucket, VerifyDepth.BITS)
    assert code == EXIT_DONE, lines


def test_the_command_verifies_to_the_requested_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging")
    for step in (1, 2):
        run.save(str(step), make_state(step))
        assert run.saver.wait_until_finished()
    forge(run)
    for options, code in (([], EXIT_DONE), (["--verify"], EXIT_DONE), (["--deep"], EXIT_FAILED)):
        assert run_command(["checkpoints", str(tmp_path / "run"), *options]) == code
    assert "DAMAGED" in capsys.readouterr().out
