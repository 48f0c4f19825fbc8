"""Cost of agreement by number of processes: milliseconds of one barrier and of one decision of host 0.

All processes share the cores of this machine, so the growth with their number is an upper bound.

    python -m tests.benchmarks.agreement [--processes 2 4 8 16 32 64] [--calls 200]
"""

import argparse
import json
import os
import subprocess
import sys

from runner.process import find_free_port

PROGRAM = """
import json, sys, time
from runner.distributed.rendezvous import Placement, join_job
from runner.spec import Deadlines

coordinator, num_processes, process, calls = sys.argv[1], *map(int, sys.argv[2:])
hosts = join_job(Placement(coordinator, num_processes, process), Deadlines(start_seconds=600))
took = {}
for name, call in (("barrier", hosts.barrier), ("agree", lambda: hosts.agree(1))):
    call()
    hosts.barrier()
    started = time.monotonic()
    for _ in range(calls):
        call()
    hosts.barrier()
    took[name] = (time.monotonic() - started) / calls * 1000
if hosts.is_main:
    print(json.dumps(took), flush=True)
hosts.leave(0)
"""


def measure(num_processes: int, calls: int) -> dict[str, float]:
    """Return the milliseconds per call, measured on process 0."""
    coordinator = f"127.0.0.1:{find_free_port()}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, coordinator, str(num_processes), str(process), str(calls)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for process in range(num_processes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--calls", type=int, default=200)
    parsed = parser.parse_args()
    before = None
    for num_processes in parsed.processes:
        took = measure(num_processes, parsed.calls)
        growth = "" if before is None else "".join(f", {name} x{took[name] / before[name]:.1f}" for name in took)
        line = f"{num_processes} processes: barrier {took['barrier']:.2f} ms, agree {took['agree']:.2f} ms{growth}"
        print(line, flush=True)
        before = took


if __name__ == "__main__":
    main()
