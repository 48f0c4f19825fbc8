"""Bounds on the measurements of `structure.py`, which may only be tightened."""

import ast

import pytest

from tests.repository.structure import ROOT, Structure, _late_attributes, measure


@pytest.fixture(scope="module")
def structure() -> Structure:
    return measure(ROOT)


def test_every_attribute_is_set_in_init_or_in_the_class_body(structure: Structure) -> None:
    assert structure.late_attributes == []


def test_each_import_by_string_has_a_reason(structure: Structure) -> None:
    reasons = {
        "experiments/model/platform.py": "the kernels of other platforms",
        "runner/__init__.py": "public classes, without jax until their first use",
        "launch/__main__.py": "the command line, once its errors are explained",
        "runner/__main__.py": "the command line, after the process has executed itself again with allocator options",
        "runner/cli/app.py": "the implementations of commands, most of which import jax",
        "runner/spec/imports.py": "the user's job class, and packages of extras, such as pyarrow",
        "runner/metrics/writers.py": "wandb, whose import takes a second",
        "runner/data/sampling.py": "grain, whose import takes a fifth of that of a trainer",
    }
    assert {place.rpartition(":")[0] for place in structure.imports_by_string} == set(reasons)
    assert len(structure.imports_by_string) <= 9


def test_the_number_of_any_dictionaries_is_bounded(structure: Structure) -> None:
    assert structure.any_dictionaries <= 36


def test_no_docstring_begins_with_a_clause(structure: Structure) -> None:
    assert structure.clause_docstrings == []


def test_names_of_public_classes_are_unique(structure: Structure) -> None:
    assert structure.repeated_names == {}


def test_sizes_and_comments_stay_in_bounds(structure: Structure) -> None:
    assert structure.files <= 285
    assert structure.lines <= 83_617
    assert structure.public_names <= 2_004
    assert structure.called_once <= 407
    assert structure.comment_share >= 1 / 13


def test_an_attribute_set_by_a_base_class_is_not_late() -> None:
    text = """
class A:
    def __init__(self):
        self.a = 1

class B(A):
    c: int
    d: int = 0

    def later(self):
        self.a, self.b = 1, 2
        self.c = self.d = 3
"""
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert _late_attributes(classes["B"], classes) == {"B.b", "B.c"}
