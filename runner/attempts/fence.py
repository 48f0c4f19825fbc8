"""Fence: the single-writer rule of a run directory, and the check that a spec continues the run in it.

An attempt is one start of a job on all its processes. Each attempt claims the next number by creating
`attempts/<number>`, which can succeed only once, on a disk and in a bucket. An attempt that finds a higher number than
its own is fenced: it ends and writes nothing more, so two attempts never share a directory. An attempt that finds its
own claim missing ends too: the directory was removed or unmounted, and another one may be in its place.
"""

import collections
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.attempts.ended import NUM_RECENT
from runner.attempts.layout import ATTEMPTS, Owner, read_owner, read_result, validate_entry_kinds
from runner.errors import EXIT_INVALID, FencedError, InvalidError, RemovedError, ResumeError, StorageError
from runner.spec import Document, JobConfig, Trajectory, fill_in_defaults, is_one_of, list_value_changes
from runner.spec.changes import format_yaml, list_stages
from runner.spec.document import dump_yaml
from runner.storage import Store, create_file, encode_json, parse_number, probe_store, read_json, read_log

_MAX_KEYS = 3  # of one section in the list of changes to paste; if there are more, the section is named instead
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RENAMED_HINT = "; if only its name changed, list the former path in its class attribute former_paths"


class Fence:
    """Single-writer rule of one directory. Process 0 claims the attempt; the others `join` it."""

    def __init__(self, store: Store):
        self._store = store
        self._newest_seen = 0
        self._id: str | None = None  # in the claim, on the process that made it
        self.attempt: int | None = None

    def find_newest(self) -> int:
        """Return the highest attempt that has claimed the directory, or 0."""
        names = self._store.list_names(ATTEMPTS)
        newest = max((number for number in map(parse_number, names) if number is not None), default=0)
        self._newest_seen = newest  # of the last call: several threads may be in one
        return newest

    def claim(self) -> int:
        """Claim and return the next attempt number, which fences every earlier attempt.

        Raises `FencedError` if so many attempts have come meanwhile that the file of this number was folded.
        """
        claim_id = uuid.uuid4().hex
        record = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "id": claim_id}
        while True:
            # Creating the file is atomic and fails if it exists: of two attempts one gets the number, the other tries
            # the next.
            number = self.find_newest() + 1
            try:
                create_file(self._store, f"{ATTEMPTS}/{number}", encode_json(record))
            except FileExistsError:  # Another attempt was faster.
                continue
            if (newest := self.find_newest()) >= number + NUM_RECENT:
                self._store.remove(f"{ATTEMPTS}/{number}")
                raise FencedError(f"attempt {newest} has taken over {self._store.url}, while this one was beginning")
            self._newest_seen = self.attempt = number
            self._id = claim_id
            return number

    def join(self, number: int) -> None:
        """Take over the attempt that process 0 has claimed. Called on every process."""
        self._newest_seen = self.attempt = number

    def check(self) -> None:
        """Raise if this attempt may not write any more. Asks the store, so it may wait for a network.

        Raises `FencedError` if a newer attempt has claimed the directory, `RemovedError` if the claim of this attempt
        is missing.
        """
        self._raise_if_fenced(self.find_newest())
        if self._id is None:  # Only the process that made the claim knows its id.
            return
        # A run that was begun in the same directory since may have a claim with the same number, but not with the same
        # id.
        try:
            is_own_claim = read_json(self._store, f"{ATTEMPTS}/{self.attempt}").get("id") == self._id
        except (FileNotFoundError, ValueError):
            is_own_claim = False
        if not is_own_claim:
            raise self._make_removed_error()

    def check_locally(self) -> None:
        """Raise like `check`, but without waiting for a network: in a bucket it uses the result of the last `check`."""
        self._raise_if_fenced(self._newest_seen if self._store.root is None else self.find_newest())

    def _raise_if_fenced(self, newest: int) -> None:
        assert self.attempt is not None, "the attempt has a number"
        # Numbers never decrease, so a lower one means that the claims were deleted.
        if newest < self.attempt:
            raise self._make_removed_error()
        if newest > self.attempt:
            raise FencedError(f"attempt {newest} has taken over {self._store.url}; attempt {self.attempt} stops")

    def _make_removed_error(self) -> RemovedError:
        return RemovedError(
            f"{self._store.url}: {ATTEMPTS}/{self.attempt}, the claim of this attempt, is missing: the directory, a "
            "part of it, or its disk was removed under the running job; restore it, or start a new run"
        )


def shorten_keys(keys: Iterable[str]) -> list[str]:
    """Return a short list of keys and sections that covers these keys."""
    sections = {key: ".".join(key.split(".")[:2]) for key in keys}
    counts = collections.Counter(sections.values())
    short = dict.fromkeys(section if counts[section] > _MAX_KEYS else key for key, section in sections.items())
    # The digest of a section is covered by any key in the section.
    return [key for key in short if not any(other.startswith(f"{key}.") for other in short)]


def is_listed(key: str, entries: Iterable[str]) -> bool:
    """Return True if a key of a trajectory may change, because it is one of these keys, or in one of these sections.

    `config.data` is a digest of a section, and so may change with any key in it.
    """
    return any(key == entry or key.startswith(f"{entry}.") or entry.startswith(f"{key}.") for entry in entries)


@dataclass(frozen=True)
class Advice:
    """Change of the spec with which a refused job could go on."""

    key: str  # dotted key to set
    value: Any
    purpose: str  # what the change is for, as the beginning of a line
    former: Sequence[str] = ()  # changed keys of the trajectory that keep their former values

    def format(self) -> str:
        """Return the advice as a line, whose value can be copied into a spec."""
        value = (
            self.value
            if isinstance(self.value, str)
            else dump_yaml(self.value, default_flow_style=True, width=sys.maxsize)
        )
        return f"{self.purpose} set {self.key}: {value.strip()}"


@dataclass(frozen=True)
class RunIdentity:
    """Identity of the run that a start would continue."""

    document: Document  # the spec, for errors with a line
    config: JobConfig  # validated config of the job, with the defaults of keys that an older run did not record
    identity: Trajectory  # keys that define the trajectory, as far as they are known yet
    # Dotted keys that nothing reads with this spec, and that therefore do not affect the trajectory.
    unread: Container[str]
    # Earlier values, by dotted key, that are equivalent to the present one, such as former paths of a class.
    former_values: Mapping[str, Container[str]] = field(default_factory=dict)
    # Function of a saved trajectory and the keys in which it differs. It returns the number of steps completed before
    # the first update that differs; None if no update differs.
    find_first_change: Callable[[Trajectory, Sequence[str]], int | None] = lambda saved, keys: 0
    # Function of a saved trajectory and its step. It returns True if a later roll-back has discarded that step.
    is_discarded: Callable[[Trajectory, int], bool] = lambda saved, step: False
    # Function of an advised change of the spec. It returns True if a start with that change would pass all checks
    # before the claim. May read data and take seconds. Process 0 only.
    is_accepted: Callable[["Advice"], bool] = lambda advice: False

    def is_continued(self, saved: Trajectory, step: int) -> bool:
        """Return True if the spec continues a trajectory that was saved at `step`; see `validate_trajectory`."""
        keys = list(self.compare_values(saved))
        return not self.is_discarded(saved, step) and (not keys or self.keeps_past(saved, keys, step))

    def list_moves(self, saved: Trajectory) -> list[str]:
        """Return the differences that are moves: new locations of the same content, and former paths of a class."""
        saved = fill_in_defaults(saved, self.identity, self.config)
        return self._format_changes(saved, [key for key in self._list_differences(saved) if self._is_moved(saved, key)])

    def list_changes(self, saved: Trajectory) -> list[str]:
        """Return the differences that are not moves. If the trajectory is continued, they affect only later steps."""
        saved = fill_in_defaults(saved, self.identity, self.config)
        return self._format_changes(saved, self._list_changes(saved))

    def compare_values(self, saved: Trajectory) -> dict[str, list[Any]]:
        """Return [saved value, present value] of each key that differs, moves left out; None where there is none."""
        saved = fill_in_defaults(saved, self.identity, self.config)
        return {key: [saved.get(key), self.identity.get(key)] for key in self._list_changes(saved)}

    def keeps_past(self, saved: Trajectory, keys: Sequence[str], step: int) -> bool:
        """Return True if the changes in these keys leave every update before `step` the same."""
        saved = fill_in_defaults(saved, self.identity, self.config)
        return _is_later(self.find_first_change(saved, keys), step)

    def find_change(self, saved: Trajectory) -> int | None:
        """Return the steps before the first update that differs from a saved trajectory; None if none differs."""
        keys = list(self.compare_values(saved))
        return self.find_first_change(fill_in_defaults(saved, self.identity, self.config), keys) if keys else None

    def validate_trajectory(self, saved: Trajectory, owner: str, url: str, get_step: Callable[[], int]) -> None:
        """Check that the spec continues a saved trajectory: that both have the same updates up to the newest step.

        A key that is `auto` on one side is not resolved yet and is not compared; the identity in a checkpoint has the
        resolved value. Locations of content are not compared, because the digest of the content is. The newest step is
        asked for only if keys have changed.

        Raises `ResumeError` if the trajectories differ before that step. Its message has a line for each key, and names
        `owner`, such as "checkpoint 40", and `url`, that of the directory.
        """
        saved, present = fill_in_defaults(saved, self.identity, self.config), self.identity
        keys = self._list_changes(saved)
        if not keys:
            return
        first, step = self.find_first_change(saved, keys), get_step()
        if _is_later(first, step):
            return
        lines = [
            self.document.format_problem(
                tuple(key.split(".")),
                f"{_format_difference(owner, saved, present, key)}"
                f"{_RENAMED_HINT if key in self.former_values else ''}{self.config.explain_digest(key, keys)}",
            )
            for key in keys
        ]
        past = f": it differs from step {first} on, and step {step} is committed" if first else ""
        hint = self.config.explain_refusal(keys, saved, step)
        # Only what would be accepted is advised; whether it would be depends on the data and the arrays of the state.
        advice = next(filter(self.is_accepted, self._list_advices(keys, saved, step, url)), None)
        ending = f"\n  {url}: this would be another trajectory{past}; use another directory"
        raise ResumeError(
            "\n".join(lines) + ending + (f"; {hint}" if hint else "") + (f"\n  {advice.format()}" if advice else "")
        )

    def _list_advices(self, keys: Sequence[str], saved: Trajectory, step: int, url: str) -> Iterator[Advice]:
        """Yield the changes of the spec that may let the job go on at `step`, the least change first."""
        if not step:
            return
        begun, present = (
            list_stages(stages or []) for stages in (saved.get("config.stages"), self.identity.get("config.stages"))
        )
        begun = [stage for stage in begun if stage["from_step"] < step]
        if begun != [stage for stage in present if stage["from_step"] < step]:
            later = [stage for stage in present if stage["from_step"] >= step]
            others = tuple(key for key in keys if key != "config.stages")
            first = " leave the former values of other keys and" if others else ""
            purpose = f"to go on,{first} keep the stages that have begun in your spec:"
            yield Advice("config.stages", [*begun, *later], purpose, others)
        given = (self.document.data.get("config") or {}).get("stages") or []
        if (stages := self.config.list_advised_stages(keys, saved, step, given)) is not None:
            purpose = f"to change this from step {step} on, leave the former values and"
            yield Advice("config.stages", stages, purpose, tuple(keys))
        # A fork takes the whole state, on whose form the job and its hooks decide.
        if any(key == "job" or key.startswith("hooks") for key in keys):
            return
        checkpoint = self.document.data.get("checkpoint") or {}
        place = {key: f" (in place of {key})" if checkpoint.get(key) else "" for key in ("fork_from", "init_from")}
        if changes := self.config.list_fork_changes(keys):
            fork = {"run": url, "step": step, "changes": shorten_keys(changes)}
            yield Advice(
                "checkpoint.fork_from", fork, f"to go on with other values in another directory{place['init_from']},"
            )
        yield Advice(
            "checkpoint.init_from",
            f"{url}/checkpoints/{step}",
            f"to begin with its weights alone in another directory{place['fork_from']},",
        )

    def _list_changes(self, saved: Trajectory) -> list[str]:
        return [key for key in self._list_differences(saved) if not self._is_moved(saved, key)]

    def _format_changes(self, saved: Trajectory, keys: Sequence[str]) -> list[str]:
        pairs = ((key, saved.get(key), self.identity.get(key)) for key in keys)
        return [line for key, former, present in pairs for line in list_value_changes(key, former, present)]

    def _list_differences(self, saved: Trajectory) -> list[str]:
        """Return the keys that have known values on both sides, are read, and differ."""
        present = self.identity
        return [
            key
            for key in saved | present
            if key not in self.unread
            and _format_value(saved, key) != _format_value(present, key)
            and "auto" not in (saved.get(key), present.get(key))
        ]

    def _is_moved(self, saved: Trajectory, key: str) -> bool:
        # The digests of the content that these keys name are separate keys below them, and are compared.
        return is_one_of(key, self.config.content_keys) or saved.get(key) in self.former_values.get(key, ())


def _is_later(first: int | None, step: int) -> bool:
    """Return True if a change from step `first` on (None: no change) does not affect a run that has reached `step`."""
    # A change from step 0 on is another trajectory even if nothing is saved yet, because the directory may be mistyped.
    return first is None or first >= max(step, 1)


def _format_difference(owner: str, saved: Trajectory, present: Trajectory, key: str) -> str:
    """Return the values of a key in both trajectories; of digests only that they differ."""
    values = [saved.get(key), present.get(key)]
    if all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in values):
        return f"{owner} has other content than the spec now names"
    former, now = (format_yaml(each[key]) if key in each else "nothing" for each in (saved, present))
    if former == now:
        return f"{owner} has other content of the data that its stages name; put them back"
    return f"{owner} has {former}, the spec {now}"


def _format_value(identity: Trajectory, key: str) -> str:
    return repr(identity[key]) if key in identity else "nothing"


def is_unstarted(store: Store) -> bool:
    """Return True if nothing was saved in a directory, and its newest attempt ended because the user must act.

    Such a directory is free for a corrected spec of the same job. While an attempt runs, or after it was killed, the
    directory is not free: a mistyped directory must not stop a job before its first save.
    """
    newest, events = Fence(store).find_newest(), read_log(store, "events")
    if store.list_names("checkpoints") or any(event.get("event") in ("save", "commit", "restore") for event in events):
        return False
    return any(
        (event.get("attempt"), event.get("event"), event.get("code")) == (newest, "failed", EXIT_INVALID)
        for event in events
    )


def validate_directory(
    store: Store,
    name: str,
    run_identity: RunIdentity,
    get_newest_step: Callable[[], int],
    has_output: Callable[[], bool] = lambda: False,
) -> None:
    """Check that a directory can be written and belongs to this job. Process 0 only; claims and changes nothing.

    The identity must continue that of the directory, unless the directory is unstarted. `has_output` returns True if
    the job has made something besides checkpoints. Raises `InvalidError` if the directory cannot be written, or belongs
    to another job, and `StorageError` if it cannot be reached.
    """
    try:
        validate_entry_kinds(store)
        if store.root is None:
            probe_store(store)  # A bucket shows missing permissions only when it is written.
        owner = read_owner(store)
        if owner is not None:
            validate_owner(store, owner, name, run_identity, get_newest_step, has_output)
    except InvalidError as error:
        raise (
            error if isinstance(error, ResumeError) else run_identity.document.error("directory", str(error))
        ) from error
    except OSError as error:
        raise StorageError(f"{store.url} cannot be reached: {error}") from error


def validate_owner(
    store: Store,
    owner: Owner,
    name: str,
    run_identity: RunIdentity,
    get_newest_step: Callable[[], int],
    has_output: Callable[[], bool],
) -> None:
    """Raise `ResumeError` unless the owner of a directory is this job, or has done nothing. Process 0 only.

    The arguments are those of `validate_directory`.
    """
    if owner.name != name:
        raise ResumeError(f"{store.url} belongs to the job {owner.name!r}, this one is {name!r}; use another directory")
    try:
        run_identity.validate_trajectory(owner.identity, "this directory's job", store.url, get_newest_step)
    except ResumeError:
        if has_output() or not is_unstarted(store):
            raise


def is_done(store: Store, total_steps: Callable[[], int]) -> bool:
    """Return True if the job of this directory has reached its end, now or in an earlier attempt.

    `total_steps` may read data, so it is called only if there is a result. A damaged `result.json` counts as missing:
    the run then ends once more, from its last checkpoint.
    """
    result = read_result(store)
    return result is not None and result.step >= total_steps()
