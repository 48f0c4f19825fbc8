"""Images and audio that evaluators return: their encoding, and their files in the run's directory.

Process 0 writes each as `media/<step>/<key>.png` or `.wav`, with `~` in place of `/` in the key, before it writes the
row. The row holds a reference to the file: `{"image": name, "width": ..., "height": ...}` or
`{"audio": name, "seconds": ..., "sample_rate": ...}`. An evaluation that is repeated after a kill writes the same
names.

If a file cannot be written, the run continues. The row still refers to the file, and readers leave it out. The files of
at most `STEPS_MAX` steps are kept.

Shape legend: H height, W width, C channels, T samples.
"""

import contextlib
import io
import re
import struct
import threading
import wave
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from runner.storage import JsonObject, Store, run_in_parallel

MEDIA_FOLDER = "media"
FILE_BYTES_MAX = 1 << 22
FILES_MAX = 16  # of one evaluator at one step
STEPS_MAX = 100  # whose files are kept
WRITE_SECONDS = 30.0  # that an evaluation waits for its files
_SIDE_MAX = 4096  # pixels
_CHANNELS_MAX = 8
_SAMPLE_RATE_MAX = 384_000
_ROUNDING = 1e-2  # by which a value may exceed its range
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 6: 4}  # number of channels by colour type: grey, RGB, RGBA
_SUFFIXES = {"image": ".png", "audio": ".wav"}
CONTENT_TYPES = {".png": "image/png", ".wav": "audio/wav"}
_KEY = re.compile(r"[A-Za-z0-9_./-]{1,150}")
_NAME = re.compile(r"media/([0-9]{8,16})/[A-Za-z0-9_.~-]{1,150}(\.png|\.wav)")


@dataclass(frozen=True, eq=False)
class Image:
    """Image that an evaluator returns.

    Attributes:
        array: grey [H, W] or [H, W, 1], RGB [H, W, 3] or RGBA [H, W, 4]; uint8, or floats from 0 to 1.
    """

    array: Any


@dataclass(frozen=True, eq=False)
class Audio:
    """Audio that an evaluator returns.

    Attributes:
        array: [T] or [T, C]; int16, or floats from -1 to 1.
        sample_rate: samples per second.
    """

    array: Any
    sample_rate: int


Media = Image | Audio


@dataclass(frozen=True)
class MediaFile:
    """Encoded image or audio, and the value of the row that refers to it."""

    name: str  # relative to the run's directory
    content: bytes
    reference: JsonObject


class UnfitMediaError(ValueError):
    """An image or audio cannot be encoded, or is too large."""


def split_media(metrics: Any) -> tuple[Any, dict[str, Media]]:
    """Return the metrics with null in place of each image and audio, and these by key."""
    if not isinstance(metrics, Mapping):
        return metrics, {}
    media = {key: value for key, value in metrics.items() if isinstance(value, Media)}
    return {**metrics, **dict.fromkeys(media)} if media else metrics, media


def encode_media(step: int, media: Mapping[str, Media]) -> tuple[dict[str, MediaFile], list[str]]:
    """Return the file of each image and audio by key, and the keys of those with values that are not finite.

    Raises `UnfitMediaError`.
    """
    if len(media) > FILES_MAX:
        raise UnfitMediaError(f"it returns {len(media)} images and audio; return at most {FILES_MAX} at a step")
    files: dict[str, MediaFile] = {}
    not_finite: list[str] = []
    for key, value in media.items():
        kind = "image" if isinstance(value, Image) else "audio"
        if not _KEY.fullmatch(key):
            raise UnfitMediaError(
                f"it returns as {key} an {kind}, whose key names a file; use at most 150 of A-Z a-z 0-9 _ . / -"
            )
        try:
            array = np.asarray(value.array)
            encoded = _encode_image(array) if isinstance(value, Image) else _encode_audio(array, value.sample_rate)
        except UnfitMediaError as error:
            raise UnfitMediaError(f"it returns as {key} an {kind} of {error}") from error
        if encoded is None:
            not_finite.append(key)
            continue
        content, details = encoded
        if len(content) > FILE_BYTES_MAX:
            raise UnfitMediaError(
                f"it returns as {key} an {kind} of {len(content):,} bytes as a file, more than {FILE_BYTES_MAX:,}; "
                "return a smaller one"
            )
        # Keys have no `~`, so two keys never share a name.
        name = f"{MEDIA_FOLDER}/{step:08}/{key.replace('/', '~')}{_SUFFIXES[kind]}"
        files[key] = MediaFile(name, content, {kind: name} | details)
    return files, not_finite


def _encode_image(array: np.ndarray) -> tuple[bytes, JsonObject] | None:
    """Return a PNG with its size, or None if a value is not finite. Raises `UnfitMediaError`."""
    image_HxWxC = array[:, :, None] if array.ndim == 2 else array
    if image_HxWxC.ndim != 3 or image_HxWxC.shape[2] not in PNG_CHANNELS.values() or 0 in image_HxWxC.shape:
        raise UnfitMediaError(f"shape {array.shape}; return [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
    height, width, channels = image_HxWxC.shape
    if max(height, width) > _SIDE_MAX:
        raise UnfitMediaError(f"shape {array.shape}; return at most {_SIDE_MAX} pixels on each side")
    pixels_HxWxC = _to_integers(image_HxWxC, np.dtype(np.uint8), 0, 255)
    if pixels_HxWxC is None:
        return None

    def make_chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    # Each line begins with the number of its filter; 0 is none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels_HxWxC.reshape(height, -1)
    (colours,) = (each for each, count in PNG_CHANNELS.items() if count == channels)
    header = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    content = _PNG_SIGNATURE + b"".join(make_chunk(*chunk) for chunk in chunks)
    return content, {"width": width, "height": height}


def _encode_audio(array: np.ndarray, sample_rate: Any) -> tuple[bytes, JsonObject] | None:
    """Return a WAV file with its duration, or None if a value is not finite. Raises `UnfitMediaError`."""
    audio_TxC = array[:, None] if array.ndim == 1 else array
    if audio_TxC.ndim != 2 or not 1 <= audio_TxC.shape[1] <= _CHANNELS_MAX or 0 in audio_TxC.shape:
        raise UnfitMediaError(f"shape {array.shape}; return [T], or [T, C] of at most {_CHANNELS_MAX} channels")
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | np.integer):
        raise UnfitMediaError(f"sample rate {sample_rate!r}; give a whole number")
    if not 1 <= sample_rate <= _SAMPLE_RATE_MAX:
        raise UnfitMediaError(f"sample rate {sample_rate}; give 1 to {_SAMPLE_RATE_MAX:,}")
    # Before the conversion, which takes several times its memory.
    if 2 * audio_TxC.size > FILE_BYTES_MAX:
        raise UnfitMediaError(f"{2 * audio_TxC.size:,} bytes, more than {FILE_BYTES_MAX:,}; return a shorter one")
    samples_TxC = _to_integers(audio_TxC, np.dtype(np.int16), -1, 32767)
    if samples_TxC is None:
        return None
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples_TxC.shape[1])
        file.setsampwidth(2)
        file.setframerate(int(sample_rate))
        file.writeframes(samples_TxC.astype("<i2").tobytes())
    seconds = round(len(samples_TxC) / int(sample_rate), 6)
    return buffer.getvalue(), {"seconds": seconds, "sample_rate": int(sample_rate)}


def _to_integers(array: np.ndarray, dtype: np.dtype, low: int, scale: int) -> np.ndarray | None:
    """Return an array of `dtype`, or of floats from `low` to 1 times `scale`, as `dtype`; None if it is not finite."""
    if array.dtype == dtype:
        return array
    # The dtypes of ml_dtypes, such as bfloat16, are no floats for NumPy.
    if not array.dtype.name.startswith(("float", "bfloat")):
        raise UnfitMediaError(f"{array.dtype}; return {dtype.name}, or floats from {low} to 1")
    values = array.astype(np.float32)
    if not np.isfinite(values).all():
        return None
    if values.min() < low - _ROUNDING or values.max() > 1 + _ROUNDING:
        raise UnfitMediaError(
            f"values from {values.min():.4g} to {values.max():.4g}; return {dtype.name}, or floats from {low} to 1"
        )
    return np.rint(np.clip(values, low, 1) * scale).astype(dtype)


# Files of a run.


class MediaWriter:
    """Writer of the files of one attempt. Process 0 only."""

    def __init__(self, store: Store):
        self._store = store
        self._thread = threading.Thread()

    def write(self, step: int, files: Sequence[MediaFile]) -> str | None:
        """Write the files of a step, and delete those of other steps that are not kept.

        Returns the reason if the files may be missing. Waits at most `WRITE_SECONDS`, since a store that hangs must not
        stop the training.
        """
        if self._thread.is_alive():
            return "the files of an earlier step are still being written"
        problems: list[str] = []

        def work() -> None:
            try:
                run_in_parallel([partial(self._store.write, file.name, file.content) for file in files])
                # Files of later steps, which a resume has discarded, and of steps that are thinned out.
                by_step = {int(name): name for name in self._store.list_names(MEDIA_FOLDER) if name.isdecimal()}
                kept = thin_steps((each for each in by_step if each <= step), STEPS_MAX)
                for each in sorted({*by_step} - {*kept}):
                    self._store.remove_tree(f"{MEDIA_FOLDER}/{by_step[each]}")
            except OSError as error:
                problems.append(str(error))

        self._thread = threading.Thread(target=work, name="media", daemon=True)
        self._thread.start()
        self._thread.join(WRITE_SECONDS)
        if self._thread.is_alive():
            return f"not written within {WRITE_SECONDS:g} s"
        return problems[0] if problems else None


def thin_steps(steps: Iterable[int], num_max: int) -> list[int]:
    """Return at most `num_max` of the steps, evenly spread, in order; the first and the last are kept.

    If steps come one after another and are thinned each time, the result is spread evenly too.
    """
    kept = sorted(steps)
    while len(kept) > max(num_max, 2):
        gaps = [after - before for before, after in zip(kept, kept[2:], strict=False)]
        del kept[1 + gaps.index(min(gaps))]
    return kept


def find_media(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the files that a row refers to, by key.

    The row may come from anyone who can write to the directory, so only names of the form that `encode_media` makes
    count: they lead to no place outside of `media/`.
    """
    found = {}
    for key, value in row.items():
        for kind, suffix in _SUFFIXES.items() if isinstance(value, dict) else ():
            match = _NAME.fullmatch(str(value.get(kind)))
            if match is not None and int(match[1]) == row.get("step") and match[2] == suffix:
                found[key] = match[0]
    return found


def read_row_media(store: Store, row: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that a row refers to, by key; without those that are missing or cannot be read."""
    found: dict[str, bytes] = {}
    for key, name in find_media(row).items():
        with contextlib.suppress(OSError):
            content = read_media(store, name)
            found |= {} if content is None else {key: content}
    return found


def read_media(store: Store, name: str) -> bytes | None:
    """Return a file that a row refers to; None if it is missing, too large, or no PNG or WAV file.

    Raises `OSError`.
    """
    info = store.list_files(name).get(name)
    if info is None or info.size_bytes > FILE_BYTES_MAX:
        return None
    content = store.read_range(name, 0, info.size_bytes, info.version)
    if name.endswith(".png"):
        # A small file may declare an image that exhausts the memory of a browser.
        is_valid = content[:8] == _PNG_SIGNATURE and content[12:16] == b"IHDR" and len(content) > 24
        is_valid = is_valid and max(struct.unpack(">II", content[16:24])) <= _SIDE_MAX
    else:
        is_valid = content[:4] == b"RIFF" and content[8:12] == b"WAVE"
    return content if is_valid else None
