"""Fake `gcloud` whose queued resources follow a script and whose hosts are directories where commands really run.

Successive resources are created on successive days of January 2026. The state is in the directory `$FAKE_GCLOUD`:

| file | content |
|---|---|
| `lives.json` | for each created resource, its state at each `describe`; the last state persists |
| `node_state` | state of the slices; READY if the file is absent |
| `preempt` | if it exists, the resource is SUSPENDED and its hosts are killed |
| `fail.json` | subcommand -> error messages, one per call, before it works again |
| `hosts/<node>-<worker>/` | home directory of a host |
| `calls.jsonl` | the arguments of every call |
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STATE = Path(os.environ["FAKE_GCLOUD"])
HOSTS_PER_SLICE = 2


def load(name: str, default: Any) -> Any:
    path = STATE / name
    return json.loads(path.read_text()) if path.exists() else default


def store(name: str, value: object) -> None:
    (STATE / name).write_text(json.dumps(value))


def fail(errors: str) -> None:
    print(errors, file=sys.stderr)
    sys.exit(1)


def kill_hosts() -> None:
    for path in STATE.glob("hosts/*/*/pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):  # the host has ended, or its pid is not written yet
            os.killpg(int(path.read_text()), signal.SIGKILL)


def run_on_host(node: str, worker: int, command: str) -> None:
    home = STATE / "hosts" / f"{node}-{worker}"
    home.mkdir(parents=True, exist_ok=True)
    stubs = f"{STATE / 'stubs'}:{os.environ['PATH']}"
    environment = {"HOME": str(home), "PATH": stubs, "WORKER": str(worker), "NODE": node, "STATE": str(STATE)}
    subprocess.run(["bash", "-c", command], env=environment, cwd=home, stdin=subprocess.DEVNULL)


def main(arguments: list[str]) -> None:
    with (STATE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    subject, verb, name = arguments[2:5]
    options = dict(word[2:].partition("=")[::2] for word in arguments if word.startswith("--"))
    failures = load("fail.json", {})
    if failures.get(verb):
        errors = failures[verb].pop(0)
        store("fail.json", failures)
        fail(errors)
    lives = load("lives.json", [["ACTIVE"]])
    resource = load("resource.json", None)
    if subject == "queued-resources":
        if verb == "create":
            if resource is not None:
                fail(f"ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: {name}")
            count = load("created.json", 0)
            created = f"2026-01-{count + 1:02}T00:00:00.123456789Z"
            states = lives[min(count, len(lives) - 1)]
            store("resource.json", {"states": states, "options": options, "created": created})
            store("created.json", count + 1)
        elif resource is None:
            fail(f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) NOT_FOUND: Resource '{name}' was not found")
        elif verb == "describe":
            if (STATE / "preempt").exists():
                kill_hosts()
                resource["states"] = ["SUSPENDED"]
            state = resource["states"][0]
            resource["states"] = resource["states"][1:] or [state]
            store("resource.json", resource)
            answer = {"name": name, "state": {"state": state}, "createTime": resource.get("created")}
            if state == "FAILED":
                answer["state"]["failedData"] = {"error": {"code": 8, "message": "no more v5e in this zone today"}}
            print(json.dumps(answer))
        elif verb == "delete":
            assert {"--force", "--quiet"} <= set(arguments)
            kill_hosts()
            shutil.rmtree(STATE / "hosts", ignore_errors=True)
            for file in ("resource.json", "preempt", "node_state"):
                (STATE / file).unlink(missing_ok=True)
    elif verb == "describe":
        endpoints = [{"ipAddress": f"10.0.0.{worker}"} for worker in range(HOSTS_PER_SLICE)]
        state = (STATE / "node_state").read_text().strip() if (STATE / "node_state").exists() else "READY"
        print(json.dumps({"name": name, "state": state, "networkEndpoints": endpoints}))
    else:
        workers = range(HOSTS_PER_SLICE) if options["worker"] == "all" else [int(options["worker"])]
        for worker in workers:
            print(f"SSH: Attempting to connect to worker {worker}...", flush=True)
            if verb == "ssh":
                run_on_host(name, worker, options["command"])
            else:
                node, target = arguments[5].split(":")
                home = STATE / "hosts" / f"{node}-{worker}"
                home.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, home / target)


main(sys.argv[1:])
