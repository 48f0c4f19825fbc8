"""Meta returned by `forward`: valid values, and means that do not depend on the split of the batch."""

from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner import BaseTrainer
from runner.errors import InvalidError, SpecError
from runner.metrics.meta import LIST_MAX, Histogram, histogram, replace_sums_by_means, to_row_value, validate_meta
from runner.train.step import Norms, compute_norms
from tests.support.bigram import BIGRAM_OPTIONS, BigramTrainer, read_trajectory
from tests.support.tiny_jobs import make_gpt

VALID_VALUES: dict[str, Any] = {
    "a float": 0.5,
    "a bool": True,
    "an integer": jnp.int32(3),
    "a half": jnp.bfloat16(0.5),
    "a list": jnp.arange(LIST_MAX),
    "a list of one": jnp.ones(1),
    "a histogram": lambda: histogram(jnp.arange(1000.0)),  # the first use compiles for a second
}
INVALID_VALUES: dict[str, tuple[Any, str]] = {
    "a text": ("some", "a str"),
    "None": (None, "a NoneType"),
    "a long list": (jnp.ones(LIST_MAX + 1), rf"float32 of shape \({LIST_MAX + 1},\)"),
    "an empty list": (jnp.ones(0), "float32 of shape"),
    "a matrix": (jnp.ones((2, 2)), r"float32 of shape \(2, 2\)"),
    "complex": (jnp.ones((), jnp.complex64), "complex64 of shape"),
    "a dictionary": ({"a": 1.0}, "a dict"),
}


@pytest.mark.parametrize("value", VALID_VALUES.values(), ids=VALID_VALUES)
def test_a_row_holds_numbers_short_lists_and_histograms(value: Any) -> None:
    value = value() if callable(value) else value
    validate_meta({"some": value})
    assert isinstance(to_row_value(jax.device_get(value)), float | list | dict)


@pytest.mark.parametrize(("value", "kind"), INVALID_VALUES.values(), ids=INVALID_VALUES)
def test_other_values_are_rejected_in_one_line(value: Any, kind: str) -> None:
    with pytest.raises(InvalidError, match=f"'some' as meta, {kind}.*; a row needs a scalar") as caught:
        validate_meta({"some": value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["loss", "loss_mean", "learning_rate", "tokens"])
def test_reserved_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidError, match="a reserved name"):
        validate_meta({name: 1.0})


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0, 2.0, 5.0], [np.nan, 1.0, np.inf, 4.0], [np.nan], []])
def test_a_histogram_counts_finite_values_as_numpy_does(values: list[float]) -> None:
    found = histogram(jnp.asarray(values, jnp.float32), bins=4)
    finite = [value for value in values if np.isfinite(value)]
    assert int(found.counts.sum()) == len(finite)
    assert np.all(np.diff(np.asarray(found.edges)) > 0)
    if len(set(finite)) > 1:
        counts, edges = np.histogram(finite, 4)
        np.testing.assert_array_equal(found.counts, counts)
        np.testing.assert_allclose(found.edges, edges, rtol=1e-6)
    row = to_row_value(jax.device_get(found))
    assert isinstance(row, dict)
    assert [len(row["counts"]), len(row["edges"])] == [4, 5]
    assert isinstance(found, Histogram)


def test_sums_are_divided_by_tokens_or_their_own_weight() -> None:
    sums = {"a": jnp.float32(6), "own": (jnp.float32(6), jnp.float32(3)), "none": (jnp.float32(0), jnp.float32(0))}
    means = replace_sums_by_means({"b": 1, "sums": sums}, jnp.float32(4))
    assert {name: to_row_value(np.asarray(mean)) for name, mean in means.items()} == {
        "a": 1.5,
        "own": 2,
        "none": None,
        "b": 1,
    }
    with pytest.raises(InvalidError, match="'a' as meta and among its sums"):
        replace_sums_by_means({"a": 1, "sums": sums}, 4)


# Whole runs.

SUMS_OPTIONS = ("right", "entropy", "parts", "right_spaces", "nothing")


@pytest.mark.soak
def test_means_do_not_depend_on_the_split_of_the_batch(tmp_path: Path) -> None:
    """Use packed documents, so that micro-batches differ in tokens."""
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(400):
        (text / f"{number}.txt").write_text(f"{number} is {'odd' if number % 2 else 'even'}\n" * (1 + number % 5))
    documents = {"config.data.source": f"{text}/*.txt", "config.data.packing": "pad", "config.train.total_steps": 3}
    documents |= {"config.train.global_batch_examples": 32, "logging.every_steps": 3}
    found = {}
    for micro in (1, 4):
        directory = tmp_path / f"micro{micro}"
        make_gpt(
            directory, BigramTrainer, **(BIGRAM_OPTIONS | documents | {"config.train.micro_batch_examples": micro})
        )()
        found[micro] = read_trajectory(directory)[-1]
    for row in found.values():
        for name in SUMS_OPTIONS:
            for key in (f"train/{name}", f"val/{name}"):
                expected = found[4][key]
                assert row[key] == (None if expected is None else pytest.approx(expected, rel=1e-5)), key
        assert row["train/loss_mean"] == pytest.approx(found[4]["train/loss_mean"], rel=1e-6)
        assert row["train/entropy"] == pytest.approx(row["train/loss"], rel=1e-6)
    assert found[1]["train/largest"] != pytest.approx(0)


def test_the_mean_over_steps_is_weighted_by_tokens(tmp_path: Path) -> None:
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(400):
        (text / f"{number}.txt").write_text("a" * (1 + number % 15))
    changes = BIGRAM_OPTIONS | {"config.data.source": f"{text}/*.txt", "config.data.packing": "pad"}
    changes |= {"config.train.total_steps": 4}
    single = make_gpt(tmp_path / "single", BigramTrainer, **changes)
    single()
    make_gpt(
        tmp_path / "window", BigramTrainer, **changes, **{"logging.every_steps": 4, "config.eval.every_steps": None}
    )()
    tokens = [int(np.asarray(single.batch("train", step)["padding_mask"]).sum()) for step in range(4)]
    assert len(set(tokens)) > 1
    rows = read_trajectory(tmp_path / "single")
    assert [row["train/token_count"] for row in rows] == tokens
    losses = [row["train/loss"] for row in rows]
    assert read_trajectory(tmp_path / "window")[-1]["train/loss_mean"] == pytest.approx(
        np.average(losses, weights=tokens)
    )


class InvalidMetaGPT(BigramTrainer):
    """A job that returns an invalid value under an unnamed key, only in validation."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: jax.Array | None) -> Any:
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum, meta | ({"x": batch["x"]} if key is None else {})


class InvalidTrainingMetaGPT(BigramTrainer):
    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: jax.Array | None) -> Any:
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum, meta | {"grad_norm/table": 1.0}


class TextMetaGPT(BigramTrainer):
    """A job that returns text in place of numbers."""

    meta: ClassVar[Any] = {"note": "text"}

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: jax.Array | None) -> Any:
        loss_sum, _ = super().forward(apply_fn, params, batch, key)
        return loss_sum if cls.meta is None else (loss_sum, cls.meta)


class TextSumGPT(TextMetaGPT):
    meta: ClassVar[Any] = {"sums": {"note": "text"}}


class TextWeightGPT(TextMetaGPT):
    meta: ClassVar[Any] = {"sums": {"note": (1.0, "text")}}


class TextGPT(TextMetaGPT):
    meta: ClassVar[Any] = "text"


class LossGPT(TextMetaGPT):
    meta: ClassVar[Any] = None


@pytest.mark.parametrize(
    ("job_class", "changes", "line"),
    [
        (InvalidMetaGPT, {}, "'x' as meta, int32 of shape"),
        (TextMetaGPT, {}, r"^\S*test_meta\.py:\d+: TextMetaGPT\.forward: returns 'note' as meta, a str; a row needs"),
        (TextSumGPT, {}, r"TextMetaGPT\.forward: returns 'note' among its sums, a str; needs a sum"),
        (TextWeightGPT, {}, "returns 'note' among its sums, a str; needs a sum"),
        (TextGPT, {}, "returns a str as meta; return a dictionary"),
        (LossGPT, {}, "returns float32 of shape .*; return the summed loss and a dictionary"),
        (
            InvalidTrainingMetaGPT,
            {"config.metrics.norms": "groups"},
            "'grad_norm/table' as meta, which is a reserved name",
        ),
    ],
)
def test_invalid_meta_is_rejected_before_anything_is_written(
    job_class: type[BaseTrainer], changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises((InvalidError, SpecError), match=line):
        make_gpt(tmp_path / "run", job_class, **BIGRAM_OPTIONS, **changes)()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("norms", "num_groups"), [("none", 0), ("groups", 2), ("parameters", 3)])
def test_norms_of_groups_add_up_to_the_global_norm(norms: Norms, num_groups: int) -> None:
    grads = {"block": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}, "head": jnp.full(4, 2.0)}
    params = jax.tree.map(lambda leaf: (leaf + 1).astype(jnp.bfloat16), grads)
    found = compute_norms(grads, params, norms)
    assert len(found) == (2 * num_groups + 1 if num_groups else 0)
    for kind, tree in {"grad_norm": grads, "param_norm": params}.items():
        groups = [value for key, value in found.items() if key.startswith(f"{kind}/")]
        whole = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree)))
        assert len(groups) == num_groups
        assert not groups or np.sqrt(np.sum(np.square(groups))) == pytest.approx(whole, rel=1e-6)
