"""Source files that run in each main flow of a training job.

    python -m tests.repository.flows

trains a tiny GPT in this process and prints, for an optimizer step, a save and a batch, the files whose functions ran,
which a reader must open to follow the flow. Files of other subjects, such as storage, are excluded. An optimizer step
is recorded while it is traced, without the model.
"""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from runner import BaseTrainer
from runner.checkpoint.save import Checkpointer
from runner.train_recipe import TrainRecipe
from tests.support.simulated_devices import configure_simulated_devices

ROOT = Path(__file__).parents[2]
# Subjects of each flow, as names below `runner` at which a path may begin; former names too, to measure older trees.
SUBJECTS = {
    "optimizer step": ("trainer", "train", "optim", "parallel", "metrics"),
    "save": ("trainer", "session", "job", "lifecycle", "checkpoint"),
    "batch": ("trainer", "session", "train/batch", "train/layout", "train/program", "data", "parallel", "train/mesh"),
}


class FileRecorder:
    """Recorder of the files whose functions run while a flow is active, in all threads.

    Profiling is switched on for threads that start later, so make the recorder before the job.
    """

    def __init__(self) -> None:
        self._active: set[str] | None = None
        self._thread: int | None = None
        sys.setprofile(self._record)
        threading.setprofile(self._record)

    def close(self) -> None:
        """Disable profiling."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._active is not None and self._thread in (None, threading.get_ident()):
            self._active.add(frame.f_code.co_filename)

    @contextlib.contextmanager
    def recording(self, files: set[str], all_threads: bool = False) -> Iterator[None]:
        """Add the files of functions that run during the body to `files`: in this thread, or in all threads."""
        before = self._active, self._thread
        self._active, self._thread = files, None if all_threads else threading.get_ident()
        try:
            yield
        finally:
            self._active, self._thread = before


def select(files: set[str], subjects: tuple[str, ...]) -> list[str]:
    """Return the files below `runner` whose path begins with one of `subjects`, relative to it."""
    package = ROOT / "runner"
    paths = [Path(name) for name in files]
    found = [path.relative_to(package).as_posix() for path in paths if path.is_relative_to(package)]
    return sorted(name for name in found if name.startswith(subjects))


def measure_flows(train: Callable[[], None]) -> dict[str, list[str]]:
    """Return the files of each flow of the training job that `train` runs in this process."""
    recorder = FileRecorder()
    step: set[str] = set()
    save: set[str] = set()
    batch: set[str] = set()
    plain_step = TrainRecipe.__dict__["train_step"].__func__
    plain_save, plain_batch = Checkpointer.save, BaseTrainer.batch

    def record_step(cls: Any, *arguments: Any) -> Any:
        with recorder.recording(step):
            return plain_step(cls, *arguments)

    def record_save(self: Checkpointer, state: Any, step: int, *arguments: Any) -> Any:
        with recorder.recording(save, all_threads=True):
            saved = plain_save(self, state, step, *arguments)
            self.wait_until_committed(step)
        return saved

    def record_batch(self: Any, *arguments: Any) -> Any:
        with recorder.recording(batch):
            return plain_batch(self, *arguments)

    BaseTrainer.train_step = classmethod(record_step)  # type: ignore[assignment]
    Checkpointer.save, BaseTrainer.batch = record_save, record_batch  # type: ignore[method-assign]
    try:
        train()
    finally:
        recorder.close()
        BaseTrainer.train_step = classmethod(plain_step)  # type: ignore[method-assign]
        Checkpointer.save, BaseTrainer.batch = plain_save, plain_batch  # type: ignore[method-assign]
    found = {"optimizer step": step, "save": save, "batch": batch}
    return {flow: select(files, SUBJECTS[flow]) for flow, files in found.items()}


def main() -> None:
    """Print the files of each flow."""
    configure_simulated_devices(1)
    from tests.support.tiny_jobs import make_gpt  # noqa: PLC0415 - imports jax, for which devices are simulated first

    with tempfile.TemporaryDirectory() as directory:
        flows = measure_flows(lambda: make_gpt(Path(directory) / "run", **{"config.train.total_steps": 4})())
    for flow, files in flows.items():
        print(f"{flow}: {len(files)} files: {' '.join(files)}")


if __name__ == "__main__":
    main()
