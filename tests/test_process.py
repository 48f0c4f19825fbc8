"""Processes of a job on this machine: environment, placement, and exit with the parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner import process
from runner.process import (
    INSISTENT_SIGNALS,
    STOP_SIGNALS,
    bind_to_parent,
    find_free_port,
    make_environment,
    make_placements,
    start_processes,
)

PRINT = "import os, sys; print(sys.argv[1:], os.getsid(0) == os.getpid(), os.environ['PLACE'], file=sys.stderr)"


@pytest.fixture
def patched_environment(monkeypatch):
    """Set the environment of this process: XLA flags of the user and two CPUs."""
    monkeypatch.setattr(process, "count_cpus", lambda: 2)
    for name in ("JAX_PLATFORMS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    return monkeypatch


def test_devices_are_simulated_only_on_request(patched_environment):
    environment = make_environment(2)
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    assert environment["XLA_FLAGS"] == flags
    assert environment["JAX_PLATFORMS"] == "cpu"
    environment = make_environment(None)
    assert environment["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "JAX_PLATFORMS" not in environment
    assert "NPROC" not in environment


def test_the_number_of_simulated_devices_replaces_a_previous_one(patched_environment):
    patched_environment.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false")
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    assert make_environment(2)["XLA_FLAGS"] == flags
    patched_environment.delenv("XLA_FLAGS")
    assert make_environment(2)["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize(("num_devices", "threads"), [(1, None), (2, "8"), (3, "12"), (8, "32")])
def test_several_devices_get_additional_threads(patched_environment, num_devices, threads):
    assert make_environment(num_devices).get("NPROC") == threads
    patched_environment.setenv("NPROC", "5")
    assert make_environment(num_devices)["NPROC"] == "5"


# Flags of XLA, `jax.config.jax_num_cpu_devices`, and the number of threads on two CPUs.
SIMULATED = [
    ("", -1, None),
    ("--xla_force_host_platform_device_count=2", -1, "8"),
    ("--xla_force_host_platform_device_count=8", -1, "32"),
    ("--xla_cpu_x=1 --xla_force_host_platform_device_count=8 --xla_cpu_y=2", -1, "32"),
    ("--xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=2", -1, "8"),
    ("", 8, "32"),
    ("", 1, None),
    ("--xla_force_host_platform_device_count=8", 2, "8"),
    ("--xla_force_host_platform_device_count=2", 3, "12"),
]


@pytest.mark.parametrize(("flags", "num_devices", "threads"), SIMULATED)
def test_simulated_devices_of_the_user_get_additional_threads(patched_environment, flags, num_devices, threads):
    variables = {"XLA_FLAGS": flags}
    process.add_cpu_threads(variables, num_devices)
    assert variables.get("NPROC") == threads
    given = {"XLA_FLAGS": flags, "NPROC": "5"}
    process.add_cpu_threads(given, num_devices)
    assert given["NPROC"] == "5"


# A thread waits for a program of all devices again and again, as a save does, while the main thread dispatches steps of
# one device. With as many threads as devices both of them wait for the steps, for which no thread is left.
BESIDE_STEPS = """
import threading, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("data",))
sharded, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
gather = jax.jit(lambda x: x * 2, out_shardings=whole)
step = jax.jit(lambda y: y @ y / 500)
x = jax.device_put(jnp.arange(1024.0), sharded)
y = step(jnp.ones((500, 500)))
gather(x).block_until_ready()
def save():
    for _ in range(20):
        gather(x).block_until_ready()
thread = threading.Thread(target=save, daemon=True)
thread.start()
while thread.is_alive():
    y = step(y)
"""


def test_two_devices_on_two_cpus_do_not_take_all_threads():
    given = {name: value for name, value in os.environ.items() if name != "NPROC"}
    command = [sys.executable, "-c", BESIDE_STEPS]
    assert subprocess.run(command, env=make_environment(2, given), timeout=300).returncode == 0


def test_a_requested_number_of_devices_outranks_that_of_the_environment(patched_environment):
    assert "JAX_NUM_CPU_DEVICES" not in make_environment(2, {"JAX_NUM_CPU_DEVICES": "8"})
    assert make_environment(None, {"JAX_NUM_CPU_DEVICES": "8"}) == {"JAX_NUM_CPU_DEVICES": "8"}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_free_port_is_not_an_ephemeral_port():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [find_free_port() for _ in range(100)]
    assert not [port for port in ports if first <= port <= last]


def test_only_several_processes_get_placement_arguments():
    assert make_placements(1) == [[]]
    first, second = make_placements(2)
    assert first[:1] + first[2:] == ["--coordinator", "--num-processes", "2", "--process-id", "0"]
    assert first[1].startswith("127.0.0.1:")
    assert second == [*first[:-1], "1"]


def test_every_process_has_its_own_session():
    started = start_processes([sys.executable, "-c", PRINT, "a b"], 2, {"PLACE": "here"}, subprocess.PIPE)
    outputs = [process.communicate(timeout=60)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for process_id, output in enumerate(outputs):
        assert output.startswith("['a b', '--coordinator', '127.0.0.1:")
        assert output.endswith(f"'--num-processes', '2', '--process-id', '{process_id}'] True here\n")


PARENT_PROGRAM = """
import os, subprocess, sys
from runner.process import start_processes
children = start_processes([sys.executable, "-c", "import time; time.sleep(600)"], 2, os.environ, 1)
print(len(children), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_processes_exit_with_their_parent_for_any_signal(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_PROGRAM],
        cwd=Path(process.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout.readline() == b"2\n"
    parent.send_signal(number)
    parent.wait()
    assert parent.stdout.read() == b""  # the children keep the pipe open until they exit
    parent.stdin.close()


def test_the_death_signal_is_not_an_insistent_stop_signal():
    assert process._DEATH_SIGNAL in set(STOP_SIGNALS) - set(INSISTENT_SIGNALS)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_process_with_a_dead_parent_does_not_start(tmp_path):
    words = bind_to_parent(["touch", str(tmp_path / "begun")])
    words[words.index(str(os.getpid()))] = "1"  # another parent than the expected one
    assert subprocess.run(words).returncode == 128 + process._DEATH_SIGNAL
    assert not (tmp_path / "begun").exists()


def test_a_bound_command_keeps_arguments_environment_and_exit_code():
    program = "import os, sys; print(sys.argv[1:], os.environ['PLACE'], os.getpid()); sys.exit(7)"
    words = bind_to_parent([sys.executable, "-c", program, "a b", "--", "#c"])
    started = subprocess.Popen(words, env={"PLACE": "here"}, stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == f"['a b', '--', '#c'] here {started.pid}\n"
    assert started.returncode == 7


@pytest.mark.parametrize(
    ("own", "expected"),
    [("0::/job/step", 500), ("0::/job", 500), ("0::/", 900), ("0::/other", 900), ("4:memory:/job", 900), ("", 900)],
)
def test_free_memory_is_that_of_the_tightest_control_group(own, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_CONTAINER", tmp_path)
    monkeypatch.setattr(process, "_OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text(f"1:cpu:/a\n{own}\n")
    (tmp_path / "job/step").mkdir(parents=True)
    groups = {"": ("1000", 200, 100), "job": ("600", 110, 10), "job/step": ("max", 0, 0)}
    for name, (limit, current, files) in groups.items():
        (tmp_path / name / "memory.max").write_text(f"{limit}\n")
        (tmp_path / name / "memory.current").write_text(f"{current}\n")
        (tmp_path / name / "memory.stat").write_text(f"anon 7\ninactive_file {files}\n")
    assert process.read_free_memory_bytes() == expected


@pytest.mark.parametrize(
    ("tunables", "free", "is_kept"),
    [
        ("glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1", 4000, True),
        ("glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1", 3999, False),  # twice the memory would be above half of it
        ("glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1", None, False),
        ("glibc.malloc.hugetlb=1:glibc.malloc.arena_max=16", 4000, False),
        ("glibc.malloc.hugetlb=1", 4000, False),  # memory of other heaps goes back anyway
        ("", 4000, False),
    ],
)
def test_freed_memory_is_kept_if_there_is_one_heap_and_room(tunables, free, is_kept, monkeypatch):
    calls = []
    allocator = SimpleNamespace(mallopt=lambda *given: not calls.append(given))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: allocator)
    monkeypatch.setattr(process, "read_free_memory_bytes", lambda: free)
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert process.keep_freed_memory(1000) is is_kept
    assert calls == ([(-4, 0), (-1, -1)] if is_kept else [])
