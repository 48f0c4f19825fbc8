"""A gcloud for tests: queued resources with a scripted life, whose hosts are directories where commands really run.

Each request is of another day of January 2026. Run as `gcloud`, with its world in the directory `$FAKE_GCLOUD`:

| file | content |
|---|---|
| `lives.json` | per resource that is created, the states it shows, one a look; the last one stays |
| `node_state` | what the slices show, READY without it |
| `preempt` | once it is there, the resource shows SUSPENDED and its hosts are dead |
| `fail.json` | subcommand -> what it prints as errors, one a call, before it works again |
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

WORLD = Path(os.environ["FAKE_GCLOUD"])
HOSTS_PER_SLICE = 2


def load(name: str, default: object) -> object:
    path = WORLD / name
    return json.loads(path.read_text()) if path.exists() else default


def store(name: str, value: object) -> None:
    (WORLD / name).write_text(json.dumps(value))


def end(errors: str) -> None:
    print(errors, file=sys.stderr)
    sys.exit(1)


def kill_hosts() -> None:
    for path in WORLD.glob("hosts/*/*/pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):  # it has ended, or its id is not written yet
            os.killpg(int(path.read_text()), signal.SIGKILL)


def remote(node: str, worker: int, command: str) -> None:
    home = WORLD / "hosts" / f"{node}-{worker}"
    home.mkdir(parents=True, exist_ok=True)
    stubs = f"{WORLD / 'stubs'}:{os.environ['PATH']}"
    environment = {"HOME": str(home), "PATH": stubs, "WORKER": str(worker), "NODE": node, "WORLD": str(WORLD)}
    subprocess.run(["bash", "-c", command], env=environment, cwd=home, stdin=subprocess.DEVNULL)


def main(arguments: list[str]) -> None:
    with (WORLD / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    subject, verb, name = arguments[2:5]
    options = dict(word[2:].partition("=")[::2] for word in arguments if word.startswith("--"))
    failures = load("fail.json", {})
    if failures.get(verb):
        errors = failures[verb].pop(0)
        store("fail.json", failures)
        end(errors)
    lives = load("lives.json", [["ACTIVE"]])
    resource = load("resource.json", None)
    if subject == "queued-resources":
        if verb == "create":
            if resource is not None:
                end(f"ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: {name}")
            count = load("created.json", 0)
            created = f"2026-01-{count + 1:02}T00:00:00.123456789Z"
            states = lives[min(count, len(lives) - 1)]
            store("resource.json", {"states": states, "options": options, "created": created})
            store("created.json", count + 1)
        elif resource is None:
            end(f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) NOT_FOUND: Resource '{name}' was not found")
        elif verb == "describe":
            if (WORLD / "preempt").exists():
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
            shutil.rmtree(WORLD / "hosts", ignore_errors=True)
            for file in ("resource.json", "preempt", "node_state"):
                (WORLD / file).unlink(missing_ok=True)
    elif verb == "describe":
        endpoints = [{"ipAddress": f"10.0.0.{worker}"} for worker in range(HOSTS_PER_SLICE)]
        state = (WORLD / "node_state").read_text().strip() if (WORLD / "node_state").exists() else "READY"
        print(json.dumps({"name": name, "state": state, "networkEndpoints": endpoints}))
    else:
        workers = range(HOSTS_PER_SLICE) if options["worker"] == "all" else [int(options["worker"])]
        for worker in workers:
            print(f"SSH: Attempting to connect to worker {worker}...", flush=True)
            if verb == "ssh":
                remote(name, worker, options["command"])
            else:
                node, target = arguments[5].split(":")
                home = WORLD / "hosts" / f"{node}-{worker}"
                home.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, home / target)


main(sys.argv[1:])
