"""What defines the bits of a run is its trajectory; the rest may change on a resume."""

from runner.spec import hash_of, parse_document, trajectory, validate_config, validate_spec
from tests.spec.sample import SPEC, Config


def test_only_what_moves_the_bits_is_part_of_the_trajectory() -> None:
    def digest(*overrides: str) -> str:
        document = parse_document(SPEC, "x", overrides)
        return hash_of(trajectory(validate_spec(document), validate_config(document, Config)))

    free = ("name=b", "directory=b", "project=b", "group=b", "topology.mesh.fsdp=4", "checkpoint.every_steps=5")
    for override in (*free, "logging.every_steps=1", "config.train.shape=constant", "config.train.rate=0.001"):
        assert digest(override) == digest()
    for override in ("seed=8", "job=a:B", "config.train.rate=0.002", "config.train.sizes=[1]"):
        assert digest(override) != digest()


def test_the_trajectory_is_flat_and_holds_defaults() -> None:
    document = parse_document(SPEC, "x")
    assert trajectory(validate_spec(document), validate_config(document, Config)) == {
        "job": "experiments.gpt:PretrainGPT",
        "seed": 7,
        "config.train.total_steps": 500,
        "config.train.rate": 0.001,
        "config.train.sizes": [1, 2],
        "config.parts": [],
    }
