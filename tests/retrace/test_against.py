"""Two runs replayed against each other: the first step, layer and leaf whose values differ are named."""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax import lax

from experiments.gpt import PretrainGPT
from experiments.mae import ReconstructImages
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.retrace.against import ArrayDifference, GroupComparison, RunsComparison, compare_values
from runner.retrace.replay import Difference
from runner.storage import JsonObject
from tests.retrace.runs import SAVES
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import get_job_name, make_gpt, stop_after

LAYERS, PLANTED = 5, 3
SMALL: dict[str, Any] = SAVES | {
    "config.model": {"layers": LAYERS, "heads": 2, "width": 8},
    "config.train.total_steps": 5,
    "config.schedule.warmup_steps": 0,
}


class PlantedGPT(PretrainGPT):
    """GPT with one other bit in the result of attention in one layer."""

    bit = 21

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        kernel = params["blocks"]["attention_out"]["kernel"][PLANTED]

        def flip(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.module.name != "attention_out" or context.method_name != "__call__":
                return call(*args, **kwargs)
            # The loop has one program for all layers, so the layer is told by its weights.
            is_layer = jnp.all(context.module.variables["params"]["kernel"] == kernel)
            x = call(*args, **kwargs)
            is_first = jnp.arange(x.size).reshape(x.shape) == 0
            other = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ (1 << cls.bit), x.dtype)
            return x + lax.stop_gradient(jnp.where(is_first & is_layer, other - x, 0))

        with nn.intercept_methods(flip):
            return super().forward(apply_fn, params, batch, key)


class RoundedGPT(PlantedGPT):
    """GPT with another one of the last bits at the same place, which may have no effect on a state for some steps."""

    bit = 2


class PlantedImages(ReconstructImages):
    """Masked autoencoder with one other bit in the result of attention in one layer."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        def flip(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            x = call(*args, **kwargs)
            if context.module.path != ("encoder_3", "Dense_1"):
                return x
            is_first = jnp.arange(x.size).reshape(x.shape) == 0
            return x + lax.stop_gradient(jnp.where(is_first, x * 2.0**-10, 0))

        with nn.intercept_methods(flip):
            return super().forward(apply_fn, params, batch, key)


# Runs that differ from the first one by these values.
OTHERS: dict[str, dict[str, Any]] = {
    "one": {},
    "same": {},
    "rate": {"config.optimizer.learning_rate": 2.0e-3},
    "precision": {"config.precision.compute": "bfloat16"},
    "seed": {"seed": 7},
    "deeper": {"config.model.layers": LAYERS + 1},
    "shorter": {},
    "unsaved": {"checkpoint.every_steps": 100},
    "remat": {"config.memory.remat": "layers"},
    "planted": {"job": "tests.retrace.test_against:PlantedGPT"},
    "sparse": {"logging.every_steps": 2},
    "rounded": {"job": "tests.retrace.test_against:RoundedGPT"},
    "one unrolled": {"config.model.layer_loop": "unroll"},
    "planted unrolled": {"config.model.layer_loop": "unroll", "job": "tests.retrace.test_against:PlantedGPT"},
}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Return a function from the name of a run to its directory; each run is made once."""
    root = tmp_path_factory.mktemp("against")

    def get(name: str) -> Path:
        directory = root / name.replace(" ", "-")
        if not directory.exists():
            job_class = {"planted": PlantedGPT, "rounded": RoundedGPT}.get(name.split()[0], PretrainGPT)
            job = make_gpt(directory, job_class, **SMALL | OTHERS[name])
            stop_after(job, 3) if name == "shorter" else job()
        return directory

    return get


@pytest.fixture
def compare(directory_of, capfd):
    """Return a function that runs the command on two runs, and returns its exit code and result."""

    def run(first: str, second: str, *words: str) -> tuple[int, JsonObject]:
        runs = [directory_of(name) for name in (first, second)]
        before = [hash_tree(each) for each in runs]
        given = ["--against", str(runs[1]), "--json", "--trust", "tests", *words]
        code = run_command(["replay", str(runs[0]), "--step", "5", *given])
        assert [hash_tree(each) for each in runs] == before
        return code, json.loads(capfd.readouterr().out.splitlines()[-1])

    return run


def list_differences(found: JsonObject) -> dict[str, JsonObject]:
    """Return the first array that differs by its kind."""
    return {each["kind"]: each["first"] for each in found["arrays"] if each["first"]}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ("one", "planted", "different"),
        ("one", "rounded", "within rounding"),
        ("one unrolled", "planted unrolled", "different"),
    ],
)
def test_one_bit_of_attention_is_found_in_its_layer(first, second, verdict, compare):
    code, found = compare(first, second)
    assert (code, found["verdict"]) == (verdict == "different", verdict)
    assert verdict != "different" or found["first_step"] == 1
    differences = list_differences(found)
    assert next(iter(differences)) == "activations without dropout"
    array = differences["activations without dropout"]
    assert (array["layer"], array["name"], array["num_different"]) == (PLANTED, "blocks.attention_out", 1)
    assert array["is_rounding"] == (verdict == "within rounding")
    assert "gradients without dropout" in differences


# The two runs, what is expected of the comparison, and the first kind of arrays that differ.
CASES: dict[str, tuple[str, str, JsonObject, str | None]] = {
    "same": ("one", "same", {"verdict": "same bits", "from_steps": [3, 3], "compared_to_step": 5}, None),
    "rate": (
        "one",
        "rate",
        {"verdict": "different", "first_step": 1, "from_steps": [0, 0]},
        "parameters after the step",
    ),
    "seed": ("one", "seed", {"verdict": "different", "first_step": 1}, "batch"),
    "precision": ("one", "precision", {"verdict": "within rounding", "first_step": 1}, "activations without dropout"),
    "deeper": ("one", "deeper", {"verdict": "different", "first_step": 1}, "parameters before the step"),
    "shorter": ("one", "shorter", {"verdict": "same bits", "compared_to_step": 3}, None),
    "unsaved": ("unsaved", "one", {"verdict": "same bits", "from_steps": [0, 0]}, None),
    "sparse": ("sparse", "one", {"verdict": "same bits", "from_steps": [3, 3]}, None),
}


@pytest.mark.parametrize(
    "case", [case if case == "same" else pytest.param(case, marks=pytest.mark.soak) for case in CASES]
)
def test_the_first_difference_of_two_runs_is_named(case, compare):
    first, second, expected, kind = CASES[case]
    code, found = compare(first, second)
    assert {key: found[key] for key in expected} == expected
    assert code == (found["verdict"] == "different")
    assert next(iter(list_differences(found)), None) == kind
    keys = [row["key"] for row in found["rows"]]
    assert ("train/learning_rate" in keys) == (case == "rate")
    missing = [name for each in found["arrays"] for name in each["uncompared"]]
    assert (f"layer {LAYERS}, blocks.query" in missing) == (case == "deeper")
    assert bool(missing) == (case == "deeper")


# Values with which the run itself is repeated: where both begin, and the first kind of arrays that differ.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("override", "starts", "kind"),
    [
        ("config.precision.compute=bfloat16", [0, 0], "activations without dropout"),
        ("topology.mesh={data: 2, fsdp: 4}", [3, 3], "gradients without dropout"),
    ],
)
def test_a_run_is_compared_with_itself_under_other_values(override, starts, kind, compare):
    code, found = compare("one", "one", "--against-set", override)
    assert (code, found["verdict"], found["from_steps"]) == (0, "within rounding", starts)
    assert next(iter(list_differences(found))) == kind
    assert any("from the beginning" in note for note in found["notes"]) == (starts == [0, 0])


@pytest.mark.parametrize(("relative", "verdict"), [(1e-3, "DIFFERENT"), (2e-7, "WITHIN ROUNDING")])
def test_the_lines_name_step_layer_and_module(relative, verdict):
    array = ArrayDifference("blocks.query", 3, 64, 1, (0, 2), relative, 9.5e-7, ("float32", "float32"))
    groups = [
        GroupComparison("batch", 3, 0, None, ()),
        GroupComparison("activations", 90, 5, array, [f"layer {layer}, blocks.query" for layer in range(4, 10)]),
    ]
    rows = [Difference(5, "train/loss", 1.0, 1.0001)]
    found = RunsComparison((0, 3), 5, 5, rows, groups, ["opt_state"], ["a note"])
    size = "this is beyond rounding" if relative > 1e-6 else "the bits differ, within rounding"
    assert [*found.format()] == [
        "a note",
        f"first difference in step 5, from the beginning and checkpoint 3: {verdict}",
        "row: train/loss is 1.0 and 1.0001",
        "batch: 3 arrays are the same",
        "activations: 5 of 90 arrays differ, at first",
        f"    layer 3, blocks.query (float32): 1 of 64 values differ, from [0, 2] on, by {relative:.2g} of the largest",
        f"    {size}, which is up to 9.5e-07 of the largest",
        "    not compared, in one run alone or with another shape: "
        + ", ".join(f"layer {layer}, blocks.query" for layer in range(4, 8))
        + " and 2 more",
        "state after the step differs in: opt_state",
    ]


@pytest.mark.soak
def test_one_bit_is_found_where_each_layer_is_a_module(tmp_path, capfd):
    changes = {
        "job": "experiments.mae:ReconstructImages",
        "config.data": {"source": "experiments.mae:UnlabelledPatterns", "options": {"noise": 0.1, "waves": 0.5}},
        "config.model": {"layers": 4, "decoder_layers": 1, "width": 16, "heads": 4, "patch": 4, "visible_patches": 6},
    }
    make_gpt(tmp_path / "one", ReconstructImages, **SAVES | changes)()
    make_gpt(tmp_path / "two", PlantedImages, **SAVES | changes | {"job": get_job_name(PlantedImages)})()
    words = ["--against", str(tmp_path / "two"), "--json", "--trust", "tests"]
    run_command(["replay", str(tmp_path / "one"), "--step", "2", *words])
    first = list_differences(json.loads(capfd.readouterr().out.splitlines()[-1]))["activations without dropout"]
    assert (first["layer"], first["name"], first["num_different"]) == (None, "encoder_3.Dense_1", 1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--step", "5", "--against-set", "seed=1"], "--against-set needs --against RUN2"),
        (["--step", "5", "--against", "{}", "--inspect"], "compares one --step K, without --inspect"),
        (["--spot-check", "--against", "{}"], "compares one --step K, without --inspect"),
        (["--step", "9", "--against", "{}"], "the run has made the steps 1 to 5"),
        (["--step", "5", "--against", "{}/none"], "holds no run"),
        (["--step", "5", "--against", "{}", "--against-set", "config.model.wdth=3"], "did you mean config.model.width"),
        (["--step", "5", "--save", "x.safetensors"], "--save and --page need --inspect"),
        (["--step", "5", "--inspect", "--save", "{}/job.json"], "would be a part of the run"),
        (["--step", "5", "--inspect", "--save", "{}-none/x.safetensors"], "in a directory that exists"),
    ],
)
def test_a_wrong_request_is_refused(words, problem, directory_of):
    directory = str(directory_of("one"))
    with pytest.raises(InvalidError) as caught:
        run_command(["replay", directory, *(word.format(directory) for word in words)])
    assert problem in str(caught.value)


FLOAT = np.array([1.0, 2.0, -4.0], np.float32)
NEXT = np.nextafter(FLOAT, np.float32(9))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FLOAT, FLOAT.copy(), None),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), None),
        (FLOAT, NEXT, (3, (0,), pytest.approx(2.0**-24, rel=1), True)),
        (FLOAT, FLOAT * 1.01, (3, (0,), pytest.approx(0.0099, rel=0.01), False)),
        (np.float32(0.0), np.float32(-0.0), (1, (), 0.0, True)),
        (FLOAT, FLOAT.astype(jnp.bfloat16), None),
        (NEXT, FLOAT.astype(jnp.bfloat16), (3, (0,), pytest.approx(2.0**-24, rel=1), True)),
        (FLOAT, np.array([1.0, np.nan, -4.0], np.float32), (1, (1,), np.inf, False)),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 8]]), (1, (1, 1), 0.5, False)),
        (np.array([True]), np.array([False]), (1, (0,), 1.0, False)),
    ],
)
def test_arrays_are_compared_by_bits_and_by_size(first, second, expected):
    found = compare_values("x", None, np.asarray(first), np.asarray(second))
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.num_different, found.position, found.relative, found.is_rounding) == expected


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["one", "one unrolled", "remat"])
def test_activations_are_those_of_each_layer(name, directory_of, tmp_path, capfd):
    path = tmp_path / "arrays.safetensors"
    words = ["--inspect", "--save", str(path), "--json"]
    assert run_command(["replay", str(directory_of(name)), "--step", "2", *words]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    saved = safetensors.numpy.load_file(path)
    leaves = {
        f"{kind}.{leaf['name']}": leaf for leaf in found["leaves"] for kind in ("parameters", "gradients", "updates")
    }
    modules = {f"activations.{each['name']}": each for each in found["activations"]}
    assert saved.keys() == leaves.keys() | modules.keys() | {
        f"activations.{each['name']}" for each in found["observed"]
    }
    for key, each in modules.items():
        values, figures = saved[key], each.get("layers", [each])
        values = values if "layers" in each else values[None]
        assert len(values) == len(figures)
        for one, figure in zip(values, figures, strict=True):
            assert figure["largest"] == pytest.approx(np.abs(one).max(), rel=1e-6)
            assert figure["rms"] == pytest.approx(np.sqrt((one.astype(np.float64) ** 2).mean()), rel=1e-4)
    # Each block adds what its two branches return to the result of the block before it.
    stream, added = (
        saved["activations.blocks"],
        [saved[f"activations.blocks.{name}"] for name in ("attention_out", "mlp_out")],
    )
    assert len(stream) == LAYERS
    change = added[0] + added[1].reshape(added[0].shape)
    np.testing.assert_allclose(stream[1:] - stream[:-1], change[1:], atol=1e-6)
    # The layer norm at the end follows from the last block and the parameters.
    last, norm = stream[-1], {key: saved[f"parameters.final_norm.{key}"] for key in ("scale", "bias")}
    centred = last - last.mean(-1, keepdims=True)
    expected = centred / np.sqrt(last.var(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]
    np.testing.assert_allclose(saved["activations.final_norm"], expected, atol=1e-4)
    # The entropy of attention follows from queries and keys.
    query, key = (saved[f"activations.blocks.{name}"].astype(np.float64) for name in ("query", "key"))
    scores = np.einsum("lbtnh,lbsnh->lbnts", query, key) / np.sqrt(query.shape[-1])
    weights = np.tril(np.exp(scores))
    weights /= weights.sum(-1, keepdims=True)
    entropy = -np.sum(weights * np.log(np.maximum(weights, 1e-30)), axis=-1).mean(axis=(1, 3))
    (observed,) = found["observed"]
    assert observed["name"] == "attention entropy of blocks"
    np.testing.assert_allclose(observed["layers"], entropy, rtol=1e-5)
    with pytest.raises(InvalidError, match="is there already"):
        run_command(["replay", str(directory_of(name)), "--step", "2", *words])
