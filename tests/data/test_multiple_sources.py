"""Datasets of several sources: mixtures, additional validation sets, and invalid combinations."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from runner.config import DataConfig
from runner.errors import DataError
from tests.data.datasets import (
    KINDS,
    count_validation_examples,
    load,
    load_kind,
    make_config,
    write_bin,
    write_documents,
    write_npy,
)

T = 8


def make_mixture(tmp_path: Path, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a mixture of three token files with disjoint ids; `changes` are overrides by name."""
    sizes = {"a": 900, "b": 2000, "c": 400}
    starts = {"a": 0, "b": 10_000, "c": 20_000}
    weights = {"a": 5, "b": 3, "c": 2}
    return [
        {
            "name": name,
            "source": str(write_bin(tmp_path / f"{name}.bin", np.arange(starts[name], starts[name] + size))),
            "weight": weights[name],
            **changes.get(name, {}),
        }
        for name, size in sizes.items()
    ]


def load_mixture(tmp_path: Path, seed: int = 0, **changes: Any) -> Any:
    return load("python-stdlib", cache=tmp_path / "cache", seed=seed, **{"mixture": make_mixture(tmp_path)} | changes)


def get_sources(rows: dict[str, np.ndarray]) -> np.ndarray:
    return rows["x"][:, 0] // 10_000


def test_examples_are_sampled_by_the_weights_of_the_sources(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path)
    for first in (0, 123_456):
        shares = np.bincount(get_sources(dataset.read("train", first, 1000)), minlength=3) / 1000
        np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=2e-3)


def test_each_source_is_read_in_its_own_order_epoch_by_epoch(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path)
    rows = dataset.read("train", 0, 1000)
    for index, part in enumerate(dataset.train_sources):
        own = rows["y"][get_sources(rows) == index]
        epoch = part.examples.num_examples
        assert len(own) > epoch
        assert len(np.unique(own[:epoch])) == epoch * T, "each target once"
        assert (own[epoch : epoch + 20] != own[:20]).any(), "another order in the next epoch"


def test_a_mixture_of_one_source_has_its_whole_share(tmp_path: Path) -> None:
    whole = load_mixture(tmp_path, mixture=make_mixture(tmp_path)[:1])
    assert [share.units for share in whole.compute_shares(100)] == [100 * T]


def test_metrics_report_the_share_of_each_source(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path)
    figures = dataset.compute_metrics(1000)
    counts = np.bincount(get_sources(dataset.read("train", 0, 1000)), minlength=3)
    for name, count, part in zip("abc", counts, dataset.train_sources, strict=True):
        assert figures[f"data/{name}/tokens"] == count * T
        assert figures[f"data/{name}/epochs"] == count / part.examples.num_examples
    assert load(tmp_path / "a.bin", cache=tmp_path / "cache").compute_metrics(1000) == {}, (
        "metrics of a single source have no shares"
    )


def test_exceeding_max_epochs_of_a_source_is_rejected(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path, mixture=make_mixture(tmp_path, c={"max_epochs": 2.5}))
    examples = dataset.train_sources[2].examples.num_examples
    enough = int(examples * 2.5 / 0.2)
    dataset.validate_epochs(enough)
    with pytest.raises(
        DataError, match=rf"data\.mixture\.c=.*c\.bin: .* epochs of its {examples * T:,}; max_epochs=2\.5"
    ):
        dataset.validate_epochs(enough + 10)


CHANGES: dict[str, dict[str, Any]] = {
    "weight": {"a": {"weight": 6}},
    "name": {"a": {"name": "other"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_mixture_change_the_fingerprint(tmp_path: Path, change: str) -> None:
    one = load_mixture(tmp_path).fingerprint
    assert load_mixture(tmp_path).fingerprint == one
    assert load_mixture(tmp_path, mixture=make_mixture(tmp_path, **CHANGES[change])).fingerprint != one
    assert load_mixture(tmp_path, mixture=make_mixture(tmp_path)[::-1]).fingerprint != one
    assert load_mixture(tmp_path, seed=1).fingerprint != one


def test_each_source_has_its_own_validation_split(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path)
    assert list(dataset.validation) == ["a", "b", "c"]
    seen = set(dataset.read("train", 0, 2000)["y"].ravel().tolist())
    for index, name in enumerate("abc"):
        held_out = dataset.read(name, 0, dataset.validation[name].num_examples)
        assert set(get_sources(held_out).tolist()) == {index}
        assert not seen & set(held_out["y"].ravel().tolist())


def test_validation_sets_are_read_in_order_and_do_not_change_training(tmp_path: Path) -> None:
    web = write_bin(tmp_path / "web.bin", range(100))
    code = write_npy(tmp_path / "code.npy", range(200, 260))
    sets = {"web": str(web), "code": {"source": str(code)}}
    plain = load(write_bin(tmp_path / "train.bin", range(500)), cache=tmp_path / "cache")
    dataset = load(tmp_path / "train.bin", cache=tmp_path / "cache", validation=sets)
    assert list(dataset.validation) == ["validation", "web", "code"]
    assert dataset.fingerprint == plain.fingerprint
    assert {name: examples.num_examples for name, examples in dataset.validation.items()} == {
        "validation": count_validation_examples(plain),
        "web": 12,
        "code": 7,
    }
    for name, first, count in (("web", 0, 12), ("code", 200, 7)):
        np.testing.assert_array_equal(
            dataset.read(name, 0, 20)["y"][:count].ravel(), np.arange(first + 1, first + 1 + count * T)
        )
        assert not dataset.read(name, 0, 20)["padding_mask"][count:].any()
    alone = load(tmp_path / "train.bin", cache=tmp_path / "cache", validation=sets, validation_fraction=0)
    assert list(alone.validation) == ["web", "code"]


@pytest.mark.daily(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_depends_on_seed_and_number_for_every_kind(tmp_path: Path, kind: str) -> None:
    together = load_kind(kind, tmp_path).read("train", 10**9, 24)
    again, other = load_kind(kind, tmp_path), load_kind(kind, tmp_path, seed=1)
    for row in (0, 7, 23):
        for name, field in again.read("train", 10**9 + row, 1).items():
            np.testing.assert_array_equal(field[0], together[name][row])
    assert any((other.read("train", 10**9, 24)[name] != field).any() for name, field in together.items())
    assert again.fingerprint == load_kind(kind, tmp_path).fingerprint != other.fingerprint


@pytest.mark.daily(5)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_shuffle_each_epoch_has_the_order_of_the_source(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"shuffle": False}
    if make_config(kind, tmp_path).get("packing") == "documents":
        with pytest.raises(ValidationError, match="shuffle=False: packing=documents"):
            load_kind(kind, tmp_path, **changes)
        changes["packing"] = "pad"
    dataset, num_examples = load_kind(kind, tmp_path, **changes), 0
    taken: dict[str, list[tuple[int, int]]] = {}
    for origin in dataset.find_origins(np.arange(2 * dataset.num_train_examples)):
        taken.setdefault(origin.source.name, []).append((origin.epoch, origin.number))
    for train in dataset.train_sources:
        places = taken[train.name]
        assert places == [divmod(index, train.examples.num_examples) for index in range(len(places))]
        num_examples = train.examples.num_examples
        starts = [spans[0][0] for index in range(num_examples) if len(spans := train.examples.get_spans(index))]
        assert starts == sorted(starts)
    # Neither seed nor batch changes it, and any stretch can be read by itself.
    other = load_kind(kind, tmp_path, seed=1, batch_examples=4, **changes)
    together = dataset.read("train", 0, num_examples + 8)
    for name, field in other.read("train", num_examples, 8).items():
        np.testing.assert_array_equal(field, together[name][num_examples:])
    if len(dataset.train_sources) == 1:
        for name, field in dataset.train_sources[0].examples.read(np.arange(num_examples)).items():
            np.testing.assert_array_equal(together[name][:num_examples], field)
    shuffled = load_kind(kind, tmp_path, **changes | {"shuffle": True})
    assert dataset.fingerprint == load_kind(kind, tmp_path, **changes).fingerprint != shuffled.fingerprint
    # A stage with the same order goes on, one with another order begins an epoch.
    for later, first, is_restarted in ((dataset, 10, False), (shuffled, 0, True)):
        (train,) = later.continue_stages([(dataset, 10, ())]).train_sources[:1]
        share = dataset.compute_shares(10)[0].epochs * train.examples.num_examples
        assert train.first_example == (round(share) if first else 0)
        assert train.is_restarted == is_restarted


INVALID_CONFIGS = {
    "two of one name": ({"mixture": [{"name": "a", "source": "x"}] * 2}, "mixture names a twice"),
    "a source and a mixture": ({"mixture": [{"name": "a", "source": "x"}], "source": "y"}, "got both source and mix"),
    "a dtype and a mixture": ({"mixture": [{"name": "a", "source": "x"}], "dtype": "uint16"}, "got both dtype and mix"),
    "weight 0": ({"mixture": [{"name": "a", "source": "x", "weight": 0}]}, "greater than 0"),
    "weight below 0": ({"mixture": [{"name": "a", "source": "x", "weight": -1}]}, "greater than 0"),
    "weight that is none": ({"mixture": [{"name": "a", "source": "x", "weight": float("nan")}]}, "finite|greater"),
    "weight without end": ({"mixture": [{"name": "a", "source": "x", "weight": float("inf")}]}, "finite"),
    "no name": ({"mixture": [{"source": "x"}]}, "name"),
    "a name with a slash": ({"mixture": [{"name": "a/b", "source": "x"}]}, "pattern"),
    "a set called train": ({"validation": {"train": "x"}}, "a set named 'train'"),
    "a set called like a source": ({"mixture": [{"name": "a", "source": "x"}], "validation": {"a": "y"}}, "named 'a'"),
    "a source called validation": ({"mixture": [{"name": "validation", "source": "x"}]}, "source named validation"),
    "characters of several": ({"mixture": [{"name": "a", "source": "x"}], "tokenizer": "characters"}, "several"),
    "characters of a set": ({"validation": {"a": "x"}, "tokenizer": "characters"}, "several"),
}


@pytest.mark.parametrize("case", INVALID_CONFIGS)
def test_invalid_combinations_of_keys_are_rejected(case: str) -> None:
    given, words = INVALID_CONFIGS[case]
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate({"sequence_length": T, **given})


UNREAD_KEYS = {"document_separator": ("nul", "no source is text"), "cache_bytes": (9, "no source is in a bucket")}


@pytest.mark.parametrize("key", UNREAD_KEYS)
def test_a_key_that_no_source_reads_is_rejected(tmp_path: Path, key: str) -> None:
    value, words = UNREAD_KEYS[key]
    tokens = write_bin(tmp_path / "tokens.bin", range(500))
    sets = {"one": {"source": str(tokens)}, "many": {"source": "python-stdlib", "mixture": make_mixture(tmp_path)}}
    for names in sets.values():
        with pytest.raises(DataError, match=f"data.{key}={value}: nothing reads it, {words}"):
            load(cache=tmp_path / "cache", **names, **{key: value})


def test_a_separator_applies_to_validation_sets(tmp_path: Path) -> None:
    tokens, sets = write_bin(tmp_path / "a.bin", range(500)), {"text": write_documents(tmp_path / "text", 60, seed=4)}
    load(tokens, cache=tmp_path / "cache", validation=sets, document_separator="nul")


def test_validation_sets_do_not_enlarge_the_vocabulary(tmp_path: Path) -> None:
    tokens, larger = write_bin(tmp_path / "a.bin", range(500)), write_bin(tmp_path / "larger.bin", range(900))
    dataset = load(tokens, cache=tmp_path / "cache", validation={"larger": str(larger)})
    assert dataset.vocabulary_size == 500
    with pytest.raises(DataError, match=r"data\.validation\.larger=.*: token id 899 .* at least 900"):
        dataset.validate_vocabulary(dataset.vocabulary_size)


def test_an_error_names_the_failing_source(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.bin")
    with pytest.raises(DataError, match=r"data\.mixture\.b: data\.source=.*gone\.bin: no file matches"):
        load_mixture(tmp_path, mixture=make_mixture(tmp_path, b={"source": gone}))
    with pytest.raises(DataError, match=r"data\.validation\.web: data\.source=.*gone\.bin: no file matches"):
        load_mixture(tmp_path, validation={"web": gone})


@pytest.mark.parametrize("packing", ["documents", "pad"])
def test_tokens_without_documents_are_not_packed_by_documents(tmp_path: Path, packing: str) -> None:
    with pytest.raises(
        DataError, match=rf"data\.packing={packing}: data\.source=.*a\.bin does not say where documents"
    ):
        load(write_bin(tmp_path / "a.bin", range(500)), cache=tmp_path, packing=packing)


def test_documents_of_one_token_have_no_target(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text("a")
    only = {"cache": tmp_path / "cache", "validation_fraction": 0}
    for packing in ("pad", "documents"):
        with pytest.raises(DataError, match="no document has two tokens"):
            load(f"{tmp_path}/*.txt", packing=packing, **only)
        with pytest.raises(DataError, match=r"data\.validation ones: holds less than one example"):
            load(
                write_documents(tmp_path / packing, 60, seed=4),
                packing=packing,
                cache=tmp_path / "cache",
                validation={"ones": f"{tmp_path}/*.txt"},
            )


def test_a_vocabulary_too_small_for_one_source_names_the_source(tmp_path: Path) -> None:
    dataset = load_mixture(tmp_path)
    dataset.validate_vocabulary(20_400)
    with pytest.raises(DataError, match=r"^data\.mixture\.c=.*c\.bin: token id 20,399 .* vocabulary of 20,000"):
        dataset.validate_vocabulary(20_000)


@pytest.mark.parametrize("packing", ["concatenate", "documents", "pad"])
def test_document_ends_enter_the_fingerprint_if_packing_uses_documents(tmp_path: Path, packing: str) -> None:
    text, prints = bytes(97 + place % 26 for place in range(2000)), []
    for first in (20, 19):  # move the end of the fourth of a hundred documents
        directory = tmp_path / str(first)
        directory.mkdir()
        edges = [*range(0, 2000, 20), 2000]
        edges[4] = 60 + first
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            (directory / f"{number:03}.txt").write_bytes(text[start:stop])
        found = load(f"{directory}/*.txt", cache=tmp_path / "cache", packing=packing, validation_fraction=0)
        prints.append(found.fingerprint)
    assert (prints[0] == prints[1]) == (packing == "concatenate")


def test_empty_documents_are_ignored(tmp_path: Path) -> None:
    pattern = write_documents(tmp_path / "text", 60, seed=4)
    before = load(pattern, cache=tmp_path / "cache", packing="documents").fingerprint
    (tmp_path / "text" / "0000b.txt").touch()
    assert load(pattern, cache=tmp_path / "cache", packing="documents").fingerprint == before
