"""Config of trainer jobs: keys of the contract, and the arithmetic between them."""

import pytest

from runner.config import ModelConfig, TrainerConfig
from runner.errors import InvalidError, SpecError
from runner.optim.config import SCHEDULES
from runner.spec import (
    ExecutionSpec,
    compute_trajectory,
    dump_spec,
    json_schema,
    parse_document,
    validate_config,
    validate_spec,
)


class GPTConfig(ModelConfig):
    has_8bit_matmuls = True
    has_gradient_rounding = True

    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.0


Config = TrainerConfig[GPTConfig]

CONTRACT = """\
name: gpt_nano
project: general
group: default
job: experiments.gpt:PretrainGPT
directory: runs/gpt_nano
seed: 0
topology:
  accelerator: any
  mesh: {data: auto, fsdp: 1, tensor: 1}
checkpoint:
  every_steps: 50
  every_minutes: null
  keep_last: 3
  keep_every_steps: null
  init_from: null
logging:
  every_steps: 10
  wandb: disabled
config:
  model: {layers: 6, heads: 6, width: 384, dropout: 0.0}
  data: {source: python-stdlib, tokenizer: bytes, sequence_length: 256, validation_fraction: 0.05}
  optimizer: {name: adamw, learning_rate: 1.0e-3, b1: 0.9, b2: 0.95, weight_decay: 0.1, clip_norm: 1.0}
  schedule: {name: cosine, warmup_steps: 100, final_learning_rate: 1.0e-4}
  train: {total_steps: 500, global_batch_examples: 16, micro_batch_examples: auto}
  eval: {every_steps: 100, batches: 20}
  precision: {params: float32, compute: float32}
"""


def validate_contract(*overrides: str) -> TrainerConfig[GPTConfig]:
    return validate_config(parse_document(CONTRACT, "specs/x.yaml", overrides), Config)


def test_the_spec_of_the_contract_is_valid() -> None:
    config = validate_contract()
    assert validate_spec(parse_document(CONTRACT, "x")).name == "gpt_nano"
    assert (config.model.width, config.optimizer.learning_rate, config.total_steps) == (384, 0.001, 500)
    assert config.train.micro_batch_examples == "auto"


def test_a_short_config_gets_the_documented_defaults() -> None:
    short = """\
config:
  model: {}
  data: {sequence_length: 8}
  optimizer: {learning_rate: 1e-3}
  train: {total_steps: 5, global_batch_examples: 2}
"""
    config = validate_config(parse_document(short, "x"), Config)
    assert (config.data.source, config.data.tokenizer, config.data.validation_fraction) == (
        "python-stdlib",
        "bytes",
        0.05,
    )
    assert (config.optimizer.name, config.optimizer.b2, config.optimizer.clip_norm) == ("adamw", 0.95, 1.0)
    assert (config.schedule.name, config.schedule.warmup_steps, config.eval.batches) == ("cosine", 0, 20)
    assert config.precision.params == config.precision.compute == "float32"
    assert (config.memory.remat, config.memory.loss_chunk_positions) == ("none", None)


@pytest.mark.parametrize(("tokens", "steps"), [(4096, 1), (4097, 2), (8192, 2), (2_500_000_000, 610_352)])
def test_a_token_budget_is_rounded_up_to_whole_steps(tokens: int, steps: int) -> None:
    config = validate_contract(
        "config.train.total_steps=null", f"config.train.total_tokens={tokens}", "config.schedule.warmup_steps=0"
    )
    assert config.units_per_step == 16 * 256
    assert config.total_steps == steps


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"), [(1, 16, 1), (1, 17, 2), (2, 40, 5), (0.1, 480, 3), (0.5, 40, 2), (1, 1, 1)]
)
def test_epochs_are_rounded_up_to_whole_steps(epochs: float, examples: int, steps: int) -> None:
    config = validate_contract(
        "config.train.total_steps=null", f"config.train.total_epochs={epochs}", "config.schedule={}"
    )
    with pytest.raises(InvalidError, match="before the data are read"):
        _ = config.total_steps
    assert config.resolve_epochs(examples).total_steps == steps


def test_epochs_shorter_than_the_schedule_are_rejected() -> None:
    config = validate_contract("config.train.total_steps=null", "config.train.total_epochs=1")
    assert config.resolve_epochs(16 * 101).total_steps == 101
    with pytest.raises(InvalidError, match=r"^1,600 examples an epoch: schedule\.warmup_steps=100 is not below"):
        config.resolve_epochs(1600)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.total_steps=null"],
            "--set config.train.total_steps=null: missing key total_steps (or total_tokens, or total_epochs)",
        ),
        (
            ["train.total_tokens=9000"],
            "--set config.train.total_tokens=9000: got both total_steps=500 and total_tokens=9000; keep one of them",
        ),
        (
            ["train.total_epochs=1.5"],
            "--set config.train.total_epochs=1.5: got both total_steps=500 and total_epochs=1.5; keep one of them",
        ),
        (
            ["train.total_steps=null", "train.total_epochs=2", "data.mixture=[{name: a, source: b}]"],
            "--set config.train.total_epochs=2: needs a single source, and data.mixture has 1, each with "
            "its own epochs; use total_steps or total_tokens",
        ),
        (
            ["train.total_steps=null", "train.total_tokens=4095"],
            "--set config.train.total_tokens=4095: is less than one step of 16 examples x 256 tokens = 4096",
        ),
        (
            ["schedule.warmup_steps=500"],
            "--set config.schedule.warmup_steps=500: is not below the total of 500 steps",
        ),
        (
            ["schedule.final_learning_rate=0.01"],
            "--set config.schedule.final_learning_rate=0.01: is above optimizer.learning_rate=0.001",
        ),
        (
            ["schedule={warmup_share: 0.999}"],
            "--set config.schedule={warmup_share: 0.999}: warmup_share=0.999 in steps=500 is not below the total of "
            "500 steps",
        ),
        (
            ["schedule.name=wsd"],
            "--set config.schedule.name=wsd: missing key decay_steps, which wsd needs; give the steps of its decay",
        ),
        (
            ["schedule.name=wsd", "schedule.decay_steps=401"],
            "--set config.schedule.decay_steps=401: schedule.warmup_steps=100 + schedule.decay_steps=401 "
            "do not fit into the total of 500 steps",
        ),
        (
            ["schedule.name=cosin"],
            "--set config.schedule.name=cosin: got 'cosin' (text), "
            "needs one of constant, linear, cosine, cosine_restarts, polynomial, wsd, inverse_square_root; "
            "did you mean cosine?",
        ),
        (
            ["data.validation_fraction=1"],
            "--set config.data.validation_fraction=1: got 1, needs a number below 1.0",
        ),
        (["model.layer=1"], "--set config.model.layer=1: unknown key; did you mean config.model.layers?"),
        (
            ["train.micro_batch_examples=-1"],
            "--set config.train.micro_batch_examples=-1: got -1, needs a number above 0 or auto",
        ),
        (
            ["memory.loss_chunk_positions=100"],
            "--set config.memory.loss_chunk_positions=100: does not divide data.sequence_length=256; use 64 or 128",
        ),
        (
            ["memory.loss_chunk_positions=512"],
            "--set config.memory.loss_chunk_positions=512: does not divide data.sequence_length=256; use 256",
        ),
        (
            ["memory.loss_chunk_positions=0"],
            "--set config.memory.loss_chunk_positions=0: got 0, needs a number above 0",
        ),
        (
            ["memory.remat=layer"],
            "--set config.memory.remat=layer: got 'layer' (text), needs one of none, dots, layers; "
            "did you mean layers?",
        ),
    ],
)
def test_an_invalid_config_is_rejected_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate_contract(*(f"config.{override}" for override in overrides))
    assert str(caught.value) == message


ARRAYS = ("data={source: 'experiments.vit:Patterns'}",)


def test_data_without_a_sequence_length_are_arrays() -> None:
    config = validate_contract(*(f"config.{override}" for override in ARRAYS))
    assert (config.data.has_tokens, config.data.unit, config.units_per_step) == (False, "examples", 16)
    assert (config.count_units(7), config.total_steps) == (7 * 16, 500)
    with pytest.raises(InvalidError, match="this job trains on tokens"):
        _ = config.data.tokens_per_example


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data={source: python-stdlib}"],
            "config.data.*: missing key sequence_length",
        ),
        (["data={mixture: [{name: a, source: 'b:C'}, {name: b, source: c.bin}]}"], "missing key sequence_length"),
        (["data.tokenizer=characters"], "tokenizer=characters: nothing reads it, as data without sequence_length"),
        (["data.document_separator=nul"], "document_separator=nul: nothing reads it"),
        (["data.packing=pad"], "packing=pad: nothing reads it"),
        (["data.cache_bytes=9"], "cache_bytes=9: nothing reads it"),
        (["data.train_on=all"], "train_on=all: nothing reads it"),
        (["data={mixture: [{name: a, source: 'b:C', dtype: uint16}]}"], r"mixture\.0\.dtype=uint16: nothing reads it"),
        (["data.validation={a: {source: 'b:C', train_on: all}}"], r"validation\.a\.train_on=all: nothing reads it"),
        (
            ["data.validation={a: text.txt}"],
            r"validation\.a\.source=text\.txt: without seq",
        ),
        (
            ["train.total_steps=null", "train.total_tokens=9000"],
            r"total_tokens=9000: .* use train\.total_steps",
        ),
        (["train.batch_ramp={from_examples: 8, increments: 1, over_tokens: 99}"], "over_tokens=99: .* use over_steps"),
        (["stages=[{from_tokens: 99, set: {optimizer.b1: 0.5}}]"], r"stages\.0\.from_tokens=99: .* use from_step"),
        (["stages=[{from_step: 9, set: {train.total_tokens: 99}}]"], r"0\.set: train\.total_tokens: .*"),
        (["eval.bits_per_byte=true"], r"eval\.bits_per_byte=True: is for text, and the data are arrays"),
        (["eval.samples={prompts: [a]}"], r"eval\.samples.*: is for text"),
        (["eval.multiple_choice=[{name: a, path: b}]"], r"eval\.multiple_choice.*: is for text"),
        (["memory.loss_chunk_positions=8"], r"memory\.loss_chunk_positions=8: is for text"),
        (["memory.row_attention=ring"], r"memory\.row_attention=ring: is for text"),
    ],
)
def test_a_key_of_tokens_is_refused_for_arrays(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate_contract(*(f"config.{override}" for override in (*ARRAYS, *overrides)))


def test_8bit_matmuls_are_refused_for_a_model_without_them() -> None:
    data = {"model": {}, "data": {"sequence_length": 8}, "train": {"total_steps": 200, "global_batch_examples": 4}}
    for matmul in ("int8", "float8"):
        with pytest.raises(ValueError, match=f"precision.matmul={matmul}: nothing reads it, as ModelConfig"):
            TrainerConfig[ModelConfig].model_validate({**data, "precision": {"matmul": matmul}})


def test_stochastic_rounding_of_gradients_is_refused_where_nothing_reads_it() -> None:
    data = {"model": {}, "data": {"sequence_length": 8}, "train": {"total_steps": 200, "global_batch_examples": 4}}

    class NearestConfig(ModelConfig):
        has_8bit_matmuls = True

    def validate(model: type[ModelConfig], **precision: str) -> None:
        precision = {"gradient_rounding": "stochastic", **precision}
        TrainerConfig[model].model_validate({**data, "precision": precision})  # type: ignore[valid-type]

    with pytest.raises(ValueError, match=r"gradient_rounding=stochastic: .* as matmul is compute; .* int8 or"):
        validate(GPTConfig)
    with pytest.raises(ValueError, match=r"precision\.gradient_rounding=stochastic: .* NearestConfig rounds to"):
        validate(NearestConfig, matmul="int8")
    validate(GPTConfig, matmul="float8")


def test_the_largest_decay_that_fits_is_accepted() -> None:
    assert validate_contract("config.schedule.name=wsd", "config.schedule.decay_steps=400").schedule.decay_steps == 400


def find_changed_keys(override: str, *base: str) -> set[str]:
    """Return the trajectory keys that differ after `override` is applied to the contract's spec with `base`."""

    def keys(*overrides: str) -> dict[str, object]:
        document = parse_document(CONTRACT, "x", overrides)
        return compute_trajectory(validate_spec(document), validate_config(document, Config))

    before, after = keys(*base), keys(*base, override)
    return {key for key in before | after if before.get(key) != after.get(key)}


@pytest.mark.parametrize(
    "override",
    [
        "config.train.micro_batch_examples=2",
        "config.eval.every_steps=7",
        "config.eval.batches=1",
        "config.memory.remat=layers",
        "config.memory.loss_chunk_positions=64",
        "topology.mesh.fsdp=2",
    ],
)
def test_parallelism_and_logging_can_change_on_resume(override: str) -> None:
    assert find_changed_keys(override) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "1"),
        ("config.model.layers", "7"),
        ("config.data.sequence_length", "128"),
        ("config.optimizer.learning_rate", "2e-3"),
        ("config.schedule.warmup_steps", "1"),
        ("config.train.global_batch_examples", "8"),
        ("config.train.total_steps", "600"),
        ("config.precision.compute", "bfloat16"),
        ("config.precision.matmul", "int8"),
    ],
)
def test_keys_that_affect_the_weights_cannot_change_on_resume(key: str, value: str) -> None:
    assert find_changed_keys(f"{key}={value}") == {key}


def test_the_rounding_of_gradients_cannot_change_on_resume() -> None:
    changed = find_changed_keys("config.precision.gradient_rounding=stochastic", "config.precision.matmul=int8")
    assert changed == {"config.precision.gradient_rounding"}


def test_a_run_with_a_constant_learning_rate_can_be_extended() -> None:
    assert find_changed_keys("config.train.total_steps=600", "config.schedule.name=constant") == set()


def test_the_schema_describes_every_key_of_the_config() -> None:
    definitions = json_schema(Config)["$defs"]
    sections = [name for name in definitions if name.endswith("Config") and name != "GPTConfig"]
    assert {"DataConfig", "OptimizerConfig", "ScheduleConfig", "TrainConfig"} <= set(sections)
    for section in sections:
        assert all("description" in part or "$ref" in part for part in definitions[section]["properties"].values())


def test_an_automatic_interval_round_trips():
    data = {"name": "x", "job": "experiments.counter:Counter", "directory": "runs/x", "checkpoint": {"every": "auto"}}
    spec = ExecutionSpec.model_validate(data)
    assert validate_spec(parse_document(dump_spec(spec), "s.yaml")) == spec
    text = dump_spec(spec).replace("every_steps: null", "every_steps: 50", 1)
    with pytest.raises(SpecError, match="every: auto chooses the interval"):
        validate_spec(parse_document(text, "s.yaml"))


def test_a_digest_of_the_data_is_explained_unless_another_key_may_be_the_cause() -> None:
    config = validate_contract()
    for others in ([], ["config.model.vocabulary_size"]):  # which follows from the data unless the spec sets it
        assert "python-stdlib does not hold the data" in config.explain_digest("config.data", ["config.data", *others])
    for keys in (["config.data", "seed"], ["config.data", "config.data.packing"], ["config.model.width"]):
        assert [config.explain_digest(key, keys) for key in keys] == [""] * len(keys)


def test_a_rejected_extension_names_the_schedules_that_allow_it() -> None:
    config = validate_contract()
    hint = config.explain_refusal(["config.train.total_steps"], {"config.train.total_steps": 7}, 1)
    assert "one of constant, inverse_square_root, without warmup_share, can be extended, and one of wsd before" in hint
    assert config.explain_refusal(["config.model.width"], {}, 0) == ""
    for name in SCHEDULES:
        keys = ["config.schedule.decay_steps=5"] if name == "wsd" else []
        free = validate_contract(f"config.schedule.name={name}", *keys).free_keys
        assert ("train.total_steps" in free) == (name in hint.partition("one of")[2].partition("and one of")[0])


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("{skip_update: {grad_norm_above: {sigmas: 0}}}", "sigmas.*above 0"),
        ("{skip_update: {grad_norm_above: {sigmas: -1.5}}}", "sigmas.*above 0"),
        ("{skip_update: {loss_above: {sigmas: .inf}}}", "sigmas.*inf"),
        ("{skip_update: {loss_above: {over_steps: 1}}}", "over_steps.*2"),
        ("{skip_update: {loss_above: {over_steps: 100000}}}", "over_steps.*10_?000"),
        ("{skip_update: {grad_norm_above: {}, loss_above: {}}}", "both"),
        ("{skip_update: {}}", "missing key grad_norm_above"),
        ("{skip_update: {grad_norm_abov: {}}}", "did you mean .*grad_norm_above"),
        ("{non_finite: skp}", "did you mean .*skip"),
        ("{non_finite: skip, max_consecutive_skips: 0}", "max_consecutive_skips"),
        ("{max_consecutive_skips: 3}", "nothing reads it"),
    ],
)
def test_an_invalid_stability_policy_is_refused_in_one_line(section: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as error:
        validate_contract(f"config.stability={section}")
    assert "\n" not in str(error.value)


def test_an_empty_stability_section_is_that_of_no_section() -> None:
    assert validate_contract("config.stability={}") == validate_contract()
    assert not validate_contract().stability.skips_updates


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ("[[5, 3]]", "does not end after its beginning"),
        ("[[3, 3]]", "does not end after its beginning"),
        ("[[-1, 3]]", "skip_steps"),
        ("[[1, 4], [3, 5]]", "join those that overlap"),
        ("[[3, 5], [1, 2]]", "sort the ranges"),
        ("[[1, 4], [1, 4]]", "join those that overlap"),
        ("[[1, 9]]", "ends beyond the total of 8 steps"),
        ("[[0, 8]]", "leaves none of the 8 steps"),
        ("[[0, 4], [4, 8]]", "leaves none of the 8 steps"),
        ("[[1]]", "skip_steps"),
        ("[1, 2]", "skip_steps"),
        ("[[1, many]]", "skip_steps"),
    ],
)
def test_invalid_ranges_of_data_to_skip_are_refused_in_one_line(ranges: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as error:
        validate_contract(
            "config.train.total_steps=8", "config.schedule.warmup_steps=1", f"config.train.skip_steps={ranges}"
        )
    assert all("skip_steps" in line for line in str(error.value).split("\n"))
