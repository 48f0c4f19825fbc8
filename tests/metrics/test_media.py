"""Images and audio of evaluators: encoding, refusals, files on a disk and in a bucket, kills, hostile references."""

import errno
import io
import json
import re
import struct
import sys
import threading
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.gpt import PretrainGPT
from runner.cli.app import main
from runner.errors import FencedError
from runner.metrics import media
from runner.metrics.media import (
    FILES_MAX,
    STEPS_MAX,
    Audio,
    Image,
    MediaWriter,
    encode_media,
    find_media,
    read_media,
    split_media,
    thin_steps,
)
from runner.metrics.rows import EncodedRow, format_csv
from runner.metrics.wandb import convert_value
from runner.metrics.writers import _encode_summary, _TensorBoardWriter
from runner.storage import LocalStore, Store
from runner.train.evaluators import EvaluatorSchedule
from tests.support import wandb_file
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import ROOT, make_gpt, read_rows, read_trajectory, stop_after
from tests.test_values import TrainLookup

KEY, STEP = "val/own/x", 8
RAMP = np.arange(6, dtype=np.uint8).reshape(2, 3)
NAME = "media/00000008/val~own~x.png"
IMAGE = {"image": NAME, "width": 3, "height": 2}


def decode_png(content: bytes) -> np.ndarray:
    """Return the pixels of a PNG without filters, after checking each chunk."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    rest, chunks = content[8:], {}
    while rest:
        (size,) = struct.unpack(">I", rest[:4])
        kind, body = rest[4:8], rest[8 : 8 + size]
        assert struct.unpack(">I", rest[8 + size : 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], rest = body, rest[12 + size :]
    width, height, depth, colour, *others = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, others, list(chunks)) == (8, [0, 0, 0], [b"IHDR", b"IDAT", b"IEND"])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


def encode(value: Any) -> tuple[bytes, dict[str, Any]]:
    files, not_finite = encode_media(STEP, {KEY: value})
    assert not_finite == []
    return files[KEY].content, files[KEY].reference


IMAGES = {
    "grey": (RAMP, RAMP),
    "grey with an axis": (RAMP[:, :, None], RAMP),
    "RGB": (np.stack([RAMP, RAMP + 9, RAMP], 2), np.stack([RAMP, RAMP + 9, RAMP], 2)),
    "RGBA": (np.stack([RAMP] * 4, 2), np.stack([RAMP] * 4, 2)),
    "float32": (RAMP.astype(np.float32) / 255, RAMP),
    "float64": (RAMP / 255, RAMP),
    "float16": ((RAMP / 5).astype(np.float16), RAMP * 51),
    "bfloat16 of JAX": (jnp.asarray([[0.0, 0.5, 1.0]] * 2, jnp.bfloat16), [[0, 128, 255]] * 2),
    "rounding beyond the range": (np.array([[-1e-3, 1.0, 1 + 1e-3]] * 2), [[0, 255, 255]] * 2),
    "a view": (np.asfortranarray(RAMP), RAMP),
    "lists": ([[0.0, 0.0, 1.0]] * 2, [[0, 0, 255]] * 2),
}


@pytest.mark.parametrize(("array", "pixels"), IMAGES.values(), ids=IMAGES)
def test_an_image_is_a_png_with_the_same_pixels(array: Any, pixels: Any) -> None:
    content, reference = encode(Image(array))
    shown = decode_png(content)
    assert shown.tolist() == np.asarray(pixels).reshape(shown.shape).tolist()
    assert reference == IMAGE
    # The bytes depend on the array alone.
    assert encode(Image(array))[0] == content


SOUND = np.array([0, 1, -1, 32767, -32767], np.int16)
SOUNDS = {
    "int16": (SOUND, SOUND[:, None]),
    "floats": (SOUND / 32767, SOUND[:, None]),
    "stereo": (np.stack([SOUND, -SOUND], 1), np.stack([SOUND, -SOUND], 1)),
    "the lowest value": (np.array([-32768], np.int16), [[-32768]]),
    "rounding beyond the range": (np.array([1.001, -1.001], np.float32), [[32767], [-32767]]),
    "bfloat16 of JAX": (jnp.asarray([0.0, 1.0], jnp.bfloat16), [[0], [32767]]),
}


@pytest.mark.parametrize(("array", "samples"), SOUNDS.values(), ids=SOUNDS)
def test_audio_is_a_wav_with_the_same_samples(array: Any, samples: Any) -> None:
    content, reference = encode(Audio(array, 8000))
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (8000, 2, np.shape(samples)[1])
        found = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert found.reshape(np.shape(samples)).tolist() == np.asarray(samples).tolist()
    name = NAME.replace("png", "wav")
    assert reference == {"audio": name, "seconds": len(np.asarray(array)) / 8000, "sample_rate": 8000}


NOISE = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
REFUSED: dict[str, tuple[Any, str]] = {
    "one axis": (Image(np.zeros(4, np.uint8)), "shape (4,)"),
    "four axes": (Image(np.zeros((1, 4, 4, 3))), "shape (1, 4, 4, 3)"),
    "two channels": (Image(np.zeros((4, 4, 2))), "shape (4, 4, 2)"),
    "channels first": (Image(np.zeros((3, 8, 8))), "shape (3, 8, 8)"),
    "no pixel": (Image(np.zeros((0, 4))), "shape (0, 4)"),
    "a wide image": (Image(np.zeros((1, 5000), np.uint8)), "at most 4096 pixels"),
    "floats up to 255": (Image(RAMP * 1.0), "values from 0 to 5; return uint8, or floats from 0 to 1"),
    "negative floats": (Image(RAMP / 5 - 0.5), "values from -0.5 to 0.5"),
    "int32": (Image(RAMP.astype(np.int32)), "int32; return uint8"),
    "bool": (Image(RAMP > 2), "bool; return uint8"),
    "complex": (Image(RAMP * 1j), "complex128; return uint8"),
    "objects": (Image([[None]]), "object; return uint8"),
    "a large image": (Image(NOISE), "bytes as a file, more than 4,194,304; return a smaller one"),
    "uint8 as audio": (Audio(RAMP[0], 8000), "uint8; return int16"),
    "loud audio": (Audio(np.array([2.0]), 8000), "values from 2 to 2; return int16, or floats from -1 to 1"),
    "silence of no length": (Audio(np.zeros(0), 8000), "shape (0,)"),
    "many channels": (Audio(np.zeros((4, 9)), 8000), "at most 8 channels"),
    "channels first in audio": (Audio(np.zeros((2, 800)), 8000), "shape (2, 800)"),
    "three axes": (Audio(np.zeros((2, 2, 2)), 8000), "shape (2, 2, 2)"),
    "a rate of 0": (Audio(SOUND, 0), "sample rate 0; give 1 to 384,000"),
    "a rate with a fraction": (Audio(SOUND, 0.5), "sample rate 0.5; give a whole number"),  # type: ignore[arg-type]
    "long audio": (Audio(np.zeros(3 << 20, np.int16), 8000), "6,291,456 bytes, more than 4,194,304"),
}


def make_schedule(store: Store, directory: Path, metrics: Any) -> tuple[EvaluatorSchedule, Any]:
    attempt = make_attempt(store)

    class Own:
        name = "own"

        def evaluate(self, weights: Any, step: int, hosts: Any) -> Any:
            return metrics() if callable(metrics) else metrics

    return EvaluatorSchedule(attempt, make_gpt(directory / "job").config, [Own()]), attempt


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_shown_is_refused_with_what_to_return(
    value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, _ = make_schedule(LocalStore(tmp_path / "run"), tmp_path, {KEY: value, "val/a": 1.0})
    assert schedule.evaluate(None, STEP) == {}
    (line,) = capsys.readouterr().err.splitlines()
    kind = "image" if isinstance(value, Image) else "audio"
    assert line.startswith(f"evaluator own at step 8: it returns as val/own/x an {kind} of ")
    assert message in line
    assert not (tmp_path / "run/media").exists()


REFUSED_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "no letter of ASCII": ({"val/ä": Image(RAMP)}, "it returns as val/ä an image, whose key names a file"),
    "long": ({"val/" + "a" * 180: Image(RAMP)}, "whose key names a file; use at most 150"),
    "the runner's": ({"train/x": Image(RAMP)}, "it returns a metric named 'train/x'"),
    "a path": ({"val/../../x": Image(RAMP)}, ""),
    "too many": ({f"val/x{n}": Image(RAMP) for n in range(FILES_MAX + 1)}, "it returns 17 images and audio"),
}


@pytest.mark.parametrize(("metrics", "message"), REFUSED_KEYS.values(), ids=REFUSED_KEYS)
def test_a_key_never_leads_out_of_the_folder(
    metrics: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, _ = make_schedule(LocalStore(tmp_path / "run"), tmp_path, metrics)
    found = schedule.evaluate(None, STEP)
    assert bool(found) == (message == "")
    assert message in capsys.readouterr().err
    written = [path.relative_to(tmp_path / "run").as_posix() for path in tmp_path.rglob("*.png")]
    assert written == ([] if message else ["media/00000008/val~..~..~x.png"])


@pytest.mark.parametrize("value", [Image(np.full((2, 2), np.nan)), Audio(np.array([0, -np.inf]), 8000)])
def test_values_that_are_not_finite_are_null_in_the_row(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, _ = make_schedule(LocalStore(tmp_path / "run"), tmp_path, {KEY: value, "val/a": 1.0})
    assert schedule.evaluate(None, STEP) == {KEY: None, "val/a": 1.0}
    assert "val/own/x: not finite; null in the row" in capsys.readouterr().err


def make_store(kind: str, directory: Path) -> Store:
    return LocalStore(directory / "run") if kind == "disk" else make_memory_bucket()


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_files_are_there_when_the_row_refers_to_them(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    returned = {KEY: Image(RAMP), "val/a": 1.0, "val/tone": Audio(SOUND, 8000)}
    schedule, _ = make_schedule(store, tmp_path, returned)
    row = {"step": STEP, **(schedule.evaluate(None, STEP) or {})}
    assert list(row) == ["step", KEY, "val/a", "val/tone"]
    assert find_media(row) == {KEY: NAME, "val/tone": "media/00000008/val~tone.wav"}
    assert all(read_media(store, name) for name in find_media(row).values())
    # The same step evaluated again, as after a kill, has the same row and files.
    assert {"step": STEP, **(schedule.evaluate(None, STEP) or {})} == row
    assert sorted(store.list_sizes("media")) == ["00000008/val~own~x.png", "00000008/val~tone.wav"]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_files_of_a_bounded_number_of_steps_are_kept(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    writer = MediaWriter(store)
    for step in range(0, 2600, 10):
        files, _ = encode_media(step, {KEY: Image(RAMP)})
        assert writer.write(step, list(files.values())) is None
    kept = sorted(int(name) for name in store.list_names("media"))
    assert (len(kept), kept[0], kept[-1]) == (STEPS_MAX, 0, 2590)
    gaps = np.diff(kept)
    assert max(gaps) <= 4 * min(gaps)
    # A run that has gone back to step 1000 has lost the later ones.
    writer.write(1010, list(encode_media(1010, {KEY: Image(RAMP)})[0].values()))
    assert max(int(name) for name in store.list_names("media")) == 1010


@pytest.mark.parametrize(
    ("steps", "num_max", "kept"),
    [
        ([], 3, []),
        ([5], 1, [5]),
        ([3, 1, 2], 3, [1, 2, 3]),
        (range(5), 3, [0, 2, 4]),
        ([0, 1, 100, 200], 3, [0, 100, 200]),
        (range(9), 0, [0, 8]),
    ],
)
def test_steps_are_thinned_where_they_are_densest(steps: Any, num_max: int, kept: list[int]) -> None:
    assert thin_steps(steps, num_max) == kept


def fail_full(verb: str, key: str) -> None:
    if "media" in key and verb == "put":
        raise OSError(errno.ENOSPC, "no space left")


def fail_listing(verb: str, key: str) -> None:
    if "media" in key and verb == "list":
        raise PermissionError("denied")


@pytest.mark.parametrize("fail", [fail_full, fail_listing])
def test_a_store_that_fails_costs_only_the_files(
    fail: Callable[[str, str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver()
    schedule, _ = make_schedule(make_memory_bucket(driver), tmp_path, {KEY: Image(RAMP), "val/a": 1.0})
    driver.before = fail
    assert schedule.evaluate(None, STEP) == {KEY: IMAGE, "val/a": 1.0}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluator own at step 8: val/own/x: ")
    assert line.endswith("the row refers to missing files")


def test_a_store_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "WRITE_SECONDS", 0.05)
    driver, goes_on = MemoryDriver(), threading.Event()
    store = make_memory_bucket(driver)
    driver.before = lambda verb, key: goes_on.wait(60) and None
    writer = MediaWriter(store)
    files = list(encode_media(STEP, {KEY: Image(RAMP)})[0].values())
    assert "not written within" in (writer.write(STEP, files) or "")
    assert "an earlier step" in (writer.write(STEP + 1, files) or "")
    goes_on.set()
    writer._thread.join(60)
    monkeypatch.setattr(media, "WRITE_SECONDS", 60.0)
    assert writer.write(STEP, files) is None


def test_a_fenced_attempt_writes_no_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    schedule, _ = make_schedule(store, tmp_path, {KEY: Image(RAMP)})
    make_attempt(store)
    with pytest.raises(FencedError):
        schedule.evaluate(None, STEP)
    assert store.list_names("media") == []


def test_other_metrics_cannot_refer_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule, _ = make_schedule(LocalStore(tmp_path / "run"), tmp_path, {KEY: dict(IMAGE), "val/a": 1.0})
    assert schedule.evaluate(None, STEP) == {}
    assert "it returns as val/own/x a dict" in capsys.readouterr().err


HOSTILE: dict[str, Any] = {
    "another step": "media/00000009/x.png",
    "a link upwards": "media/00000008/../../job.png",
    "an absolute path": "/media/00000008/x.png",
    "another folder": "checkpoints/00000008/x.png",
    "a folder within": "media/00000008/a/x.png",
    "another suffix": "media/00000008/x.html",
    "two suffixes": "media/00000008/x.png.svg",
    "audio as an image": "media/00000008/x.wav",
    "a line break": "media/00000008/x.png\n",
    "a backslash": "media/00000008/..\\x.png",
    "an encoded slash": "media/00000008/..%2fx.png",
    "digits of another script": "media/٠٠٠٠٠٠٠٨/x.png",
    "a URL": "data:text/html,x.png",
    "markup": "media/00000008/<b>.png",
    "long": f"media/00000008/{'x' * 5000}.png",
    "a number": 8,
    "a list": ["media/00000008/x.png"],
    "null": None,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_row_refers_only_to_files_of_its_step(name: Any) -> None:
    assert find_media({"step": STEP, KEY: {"image": name, "width": 1, "height": 1}}) == {}
    assert find_media({"step": STEP, KEY: {"image": NAME}}) == {KEY: NAME}


PNG = encode(Image(RAMP))[0]
FILES: dict[str, tuple[str, bytes, bool]] = {
    "an image": (NAME, PNG, True),
    "audio": ("media/00000008/x.wav", encode(Audio(SOUND, 8000))[0], True),
    "markup": (NAME, b"<svg onload='alert(1)'>", False),
    "a short file": (NAME, PNG[:20], False),
    "an empty file": (NAME, b"", False),
    "an image of 10^10 pixels": (NAME, PNG[:16] + struct.pack(">II", 100_000, 100_000) + PNG[24:], False),
    "a large file": (NAME, PNG + b"x" * media.FILE_BYTES_MAX, False),
    "an image as audio": ("media/00000008/x.wav", PNG, False),
}


@pytest.mark.parametrize("kind", ["disk", "bucket"])
@pytest.mark.parametrize(("name", "content", "is_read"), FILES.values(), ids=FILES)
def test_only_images_and_audio_of_bounded_size_are_read(
    name: str, content: bytes, is_read: bool, kind: str, tmp_path: Path
) -> None:
    store = make_store(kind, tmp_path)
    store.write(name, content)
    assert read_media(store, name) == (content if is_read else None)
    assert read_media(store, "media/00000009/x.png") is None


def test_writers_and_csv_leave_references_as_they_are() -> None:
    row = {"step": STEP, "train/loss": 1.0, KEY: IMAGE}
    assert NAME.encode() not in _encode_summary(row)
    assert convert_value(IMAGE) is None
    assert NAME in list(format_csv([EncodedRow.from_row(row)]))[1]


@pytest.mark.parametrize("metrics", [None, [], 5, {"val/a": 1.0}])
def test_metrics_without_media_pass_through(metrics: Any) -> None:
    assert split_media(metrics) == (metrics, {})


# Runs.


class PictureTrainer(TrainLookup):
    """A job with an evaluator that draws the step."""

    kill_step = -1

    def evaluator(self) -> Any:
        trainer = self

        class Drawing:
            every_steps = 2

            def evaluate(self, weights: Any, step: int, hosts: Any) -> Any:
                return {
                    "val/drawing": Image(np.full((2, 2), step, np.uint8)),
                    "val/inverse": Image(np.full((2, 2), 255 - step, np.uint8)),
                    "val/tone": Audio(SOUND, 8000),
                    "val/own": 1.0,
                }

        class Killing:
            every_steps = 2

            def evaluate(self, weights: Any, step: int, hosts: Any) -> Any:
                if step == trainer.kill_step:
                    raise FencedError("killed after the files of this step, before its row")
                return {}

        return [Drawing(), Killing()]


class KilledPictureTrainer(PictureTrainer):
    """The same job, killed between the files of step 6 and its row."""

    kill_step = 6


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.glob("media/*/*")}


@pytest.mark.parametrize("interruption", ["kill between files and row", "stop", "none"])
def test_rows_and_files_are_those_of_an_undisturbed_run(interruption: str, tmp_path: Path) -> None:
    make_gpt(tmp_path / "whole", PictureTrainer)()
    if interruption.startswith("kill"):
        with pytest.raises(FencedError):
            make_gpt(tmp_path / "run", KilledPictureTrainer)()
        assert "media/00000006/val~drawing.png" in read_files(tmp_path / "run")
        assert max(row["step"] for row in read_rows(tmp_path / "run")) < 6
    elif interruption == "stop":
        stop_after(make_gpt(tmp_path / "run", PictureTrainer), 5)
    make_gpt(tmp_path / "run", PictureTrainer)()
    assert read_trajectory(tmp_path / "run") == read_trajectory(tmp_path / "whole")
    assert read_files(tmp_path / "run") == read_files(tmp_path / "whole")
    rows = read_rows(tmp_path / "run")
    assert {name for row in rows for name in find_media(row).values()} == {*read_files(tmp_path / "run")}


def test_tensorboard_and_wandb_show_images_and_audio_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_API_KEY": "", "NETRC": "/nonexistent", "WANDB_CACHE_DIR": str(tmp_path / "c")}.items():
        monkeypatch.setenv(name, value)
    for name in ("exit", "excepthook"):  # wandb replaces these functions
        monkeypatch.setattr(sys, name, getattr(sys, name))
    changes = {"logging.tensorboard": True, "logging.wandb": "offline"}
    with pytest.raises(FencedError):
        make_gpt(tmp_path / "run", KilledPictureTrainer, **changes)()
    make_gpt(tmp_path / "run", PictureTrainer, **changes)()
    files, steps = read_files(tmp_path / "run"), [2, 4, 6, 8]
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0, "audio": 0})
    shown.Reload()
    images, sounds = shown.Images("val/drawing"), shown.Audio("val/tone")
    assert [event.step for event in images] == [event.step for event in sounds] == steps
    for image, sound in zip(images, sounds, strict=True):
        assert image.encoded_image_string == files[f"media/{image.step:08}/val~drawing.png"]
        assert (image.width, image.height) == (2, 2)
        assert sound.encoded_audio_string == files[f"media/{sound.step:08}/val~tone.wav"]
        assert (sound.sample_rate, sound.length_frames, sound.content_type) == (8000, len(SOUND), "audio/wav")
    (path,) = (tmp_path / "run").glob("wandb/wandb/offline-run-*/run-*.wandb")
    rows = [row for row in wandb_file.read_history(path) if "val/drawing/path" in row]
    assert [row["step"] for row in rows] == steps
    for row in rows:
        for key, kind, name in (
            ("val/drawing", "image-file", f"media/{row['step']:08}/val~drawing.png"),
            ("val/inverse", "image-file", f"media/{row['step']:08}/val~inverse.png"),
            ("val/tone", "audio-file", f"media/{row['step']:08}/val~tone.wav"),
        ):
            assert row[f"{key}/_type"] == kind
            assert (path.parent / "files" / row[f"{key}/path"]).read_bytes() == files[name]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
@pytest.mark.parametrize("damage", ["none", "missing", "short", "not a PNG"])
def test_a_damaged_file_is_left_out_by_writers(
    kind: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    store = make_store(kind, tmp_path / "run")
    content = {"none": PNG, "short": PNG[:20], "not a PNG": b"x" * 100}.get(damage)
    if content is not None:
        store.write(NAME, content)
    writer = _TensorBoardWriter(store, "run", 1)
    writer.add({"step": STEP, "train/loss": 1.0, KEY: IMAGE})
    writer.supersede()
    writer.finish()
    (name,) = store.list_names("tensorboard")
    (tmp_path / name).write_bytes(store.read(f"tensorboard/{name}"))
    found = EventAccumulator(str(tmp_path / name)).Reload()
    assert found.Tags()["scalars"] == ["train/loss"]
    assert found.Tags()["images"] == ([KEY] if damage == "none" else [])


def test_the_command_evaluate_leaves_images_and_audio_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_gpt(tmp_path / "run", PictureTrainer, job=f"{__name__}:{PictureTrainer.__name__}")()
    before = read_files(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--trust", "tests"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["metrics"]["own"] == 1.0
    assert not {"drawing", "tone"} & {*record["metrics"]}
    assert read_files(tmp_path / "run") == before


def test_a_job_without_images_or_audio_gets_no_folder(tmp_path: Path) -> None:
    make_gpt(tmp_path / "run", TrainLookup)()
    assert not (tmp_path / "run/media").exists()


class DocumentedGPT(PretrainGPT):
    """A job with the evaluators of the page about evaluation."""

    def evaluator(self) -> Any:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / ".github/docs/evaluation.md").read_text(), re.DOTALL)
        names: dict[str, Any] = {"PretrainGPT": PretrainGPT}
        for block in blocks:
            exec(block, names)
        return [names["Spread"](), names["Embeddings"]()]


def test_the_documented_evaluators_run(tmp_path: Path) -> None:
    make_gpt(tmp_path / "run", DocumentedGPT, **{"config.eval.every_steps": 4})()
    last = read_rows(tmp_path / "run")[-1]
    assert last["val/embedding"] == {"image": "media/00000008/val~embedding.png", "width": 32, "height": 64}
    assert len(LocalStore(tmp_path / "run").list_sizes("media")) == 2  # steps 4 and 8
    assert {
        name.removeprefix("media/") for row in read_rows(tmp_path / "run") for name in find_media(row).values()
    } == {*LocalStore(tmp_path / "run").list_sizes("media")}
