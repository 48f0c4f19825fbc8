"""Attempts without a job, and jobs prepared up to their first step."""

from typing import TypeVar

from runner import RestoreableJob
from runner.attempts.attempt import Attempt
from runner.attempts.events import EventLog
from runner.attempts.fence import Fence
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.distributed.preemption import StopNotice
from runner.storage import BackgroundWriter, JsonlLog, Store

JobType = TypeVar("JobType", bound=RestoreableJob)


def make_attempt(store: Store, log: JsonlLog | None = None) -> Attempt:
    """Claim the next attempt number in `store` for one process; events go to `log`, or else to the store's ledger."""
    fence, background = Fence(store), BackgroundWriter()
    number = fence.claim()
    events = EventLog(log or JsonlLog(store, "events", f"{number:06}.0", background), number, 0)
    hosts = Hosts.single_process()
    return Attempt(number, "run", store, hosts, StopNotice(), Progress(), fence, events, background)


def start(job: JobType) -> JobType:
    """Claim the directory and restore `job`, so that its next call is the first step; no watchdog is started."""
    job.lifecycle.claim(Hosts.single_process(), StopNotice(), Progress())
    job.lifecycle.prepare_and_restore()
    return job
