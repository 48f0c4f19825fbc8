"""Keys at the coordinator: every process reads a key before it is deleted, and their number is bounded."""

import random
import re
import threading
from pathlib import Path

import jax
import pytest

from runner.distributed import key_value
from runner.distributed.clock import Progress
from runner.distributed.key_value import MAX_DECISIONS, KeyValueStore
from runner.distributed.watchdog import StragglerDetector
from runner.errors import PeerLostError
from tests.support.coordinator import MemoryCoordinator, run_on_all_hosts

RUNNER = Path(key_value.__file__).parents[1]


def test_no_other_module_accesses_the_store():
    found = {
        path.name
        for path in RUNNER.rglob("*.py")
        if re.search(r"(?<!model)\.key_value_|wait_at_barrier", path.read_text())
    }
    assert found == {"key_value.py"}


@pytest.mark.soak
def test_10_000_decisions_leave_at_most_64_keys():
    coordinator = MemoryCoordinator(64)

    def agree(hosts):
        return all(hosts.agree(number) == number for number in range(10_000))

    assert all(run_on_all_hosts(coordinator.hosts(), agree))
    assert coordinator.most_keys <= MAX_DECISIONS + 3 * 64


def test_gathers_leave_the_keys_of_at_most_three():
    coordinator = MemoryCoordinator(8)

    def gather(hosts):
        mine = hosts.process_id
        return all(hosts.gather([mine, number]) == [[p, number] for p in range(8)] for number in range(300))

    assert all(run_on_all_hosts(coordinator.hosts(), gather))
    assert coordinator.most_keys <= 3 * 8


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_returns_the_same_everywhere(seed):
    coordinator = MemoryCoordinator(5)
    calls = random.Random(seed).choices(["agree", "gather", "reduce", "run_on_main"], weights=[30, 1, 1, 3], k=1000)

    def call_all(hosts):
        act = {
            "agree": lambda number: hosts.agree([number, hosts.process_id]),
            "gather": lambda number: hosts.gather([number, hosts.process_id]),
            "reduce": lambda number: hosts.reduce(
                [number, hosts.process_id], lambda values: [*values, hosts.process_id]
            ),
            "run_on_main": lambda number: hosts.run_on_main(lambda: [number, hosts.process_id]),
        }
        return [act[name](number) for number, name in enumerate(calls)]

    expected = [
        {
            "gather": [[number, process] for process in range(5)],
            "reduce": [*([number, process] for process in range(5)), 0],
        }.get(name, [number, 0])
        for number, name in enumerate(calls)
    ]
    assert run_on_all_hosts(coordinator.hosts(), call_all) == [expected] * 5
    assert coordinator.most_keys <= MAX_DECISIONS + 3 * 5


COLLECTIVES = {
    "equal values": lambda hosts: hosts.gather(["mesh", 8]),
    "one exception": lambda hosts: hosts.gather("slow" if hosts.process_id == 1 else None),
    "reduction of different values": lambda hosts: hosts.reduce(f"host-{hosts.process_id}", len),
    "barrier": lambda hosts: hosts.barrier(),
    "decision": lambda hosts: hosts.agree("value"),
    "stop": lambda hosts: hosts.agree_on_tick(8),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_cost_of_a_collective_grows_linearly_with_the_processes(name):
    costs = {}
    for num_processes in (4, 8, 32):
        coordinator = MemoryCoordinator(num_processes)
        results = run_on_all_hosts(coordinator.hosts(), COLLECTIVES[name])
        assert all(result == results[0] for result in results)
        costs[num_processes] = coordinator.num_calls, coordinator.num_bytes
    for cost in zip(*costs.values(), strict=True):
        assert cost[2] <= 4.5 * cost[1] <= 4.5 * 2.5 * cost[0], costs


def test_process_0_deletes_no_decision_that_a_slow_process_has_not_read():
    coordinator = MemoryCoordinator(3)
    main, prompt, late = coordinator.hosts()
    heard = {}

    def agree(hosts):
        heard[hosts.process_id] = [hosts.agree(number) for number in range(3 * MAX_DECISIONS)]

    threads = [threading.Thread(target=agree, args=(hosts,)) for hosts in (main, prompt, late)]
    for thread in threads[:2]:
        thread.start()
    coordinator.wait_until(lambda: coordinator.num_at_barrier() == 2)
    decisions = [key for key in coordinator.list_keys() if key.startswith(key_value.DECISIONS)]
    assert len(decisions) == MAX_DECISIONS, "the late host has not read any of them"
    threads[2].start()
    for thread in threads:
        thread.join()
    assert heard == {process: list(range(3 * MAX_DECISIONS)) for process in range(3)}


def test_late_parts_of_a_failed_save_are_deleted_with_the_next_save():
    coordinator = MemoryCoordinator(3)
    main, *others = coordinator.hosts()
    for save in range(1, 20):
        folder = key_value.save_folder(save, "written")
        is_one_late = save % 3 == 0
        for hosts in others[is_one_late:]:
            assert hosts.collect(folder, f"part {hosts.process_id}", 30) == [f"part {hosts.process_id}"]
        if is_one_late:
            with pytest.raises(PeerLostError, match="the part of process 1 did not arrive within 0 s"):
                main.collect(folder, "part 0", 0.01)
            others[0].collect(folder, "late", 30)
            assert len(coordinator.list_keys()) == 2
        else:
            assert main.collect(folder, "part 0", 30) == ["part 0", "part 1", "part 2"]
            assert coordinator.list_keys() == []


def test_straggler_rounds_leave_one_key_per_process_and_one_for_the_round(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    coordinator = MemoryCoordinator(4)
    rounds = [
        (StragglerDetector(hosts, progress), progress) for hosts in coordinator.hosts() for progress in [Progress()]
    ]
    for step in range(3000):
        now[0] += 0.5
        for every, progress in rounds:
            progress.report_step(step)
            every.update_round()
            every.exchange_arrivals()
    number, _ = KeyValueStore(coordinator).try_get(key_value.ROUND)
    assert number > 100
    assert coordinator.most_keys == 4 + 1


def test_every_call_raises_a_lost_peer_if_the_coordinator_is_gone():
    class Unreachable:
        def __getattr__(self, name):
            def fail(*arguments, **options):
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nand more")

            return fail

    store = KeyValueStore(Unreachable())
    calls = [
        lambda: store.set("a", 1),
        lambda: store.get("a", 1.0, "a"),
        lambda: store.try_get("a"),
        lambda: store.list_values("a"),
        lambda: store.delete("a"),
        lambda: store.barrier(1.0),
    ]
    for call in calls:
        with pytest.raises(PeerLostError, match="JaxRuntimeError: UNAVAILABLE: failed to connect"):
            call()
