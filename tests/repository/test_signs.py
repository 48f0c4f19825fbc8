"""The signs of `signs.py` stay where they are, or get better. A number here may only be lowered."""

import ast

import pytest

from tests.repository.signs import ROOT, Signs, _late_attributes, measure


@pytest.fixture(scope="module")
def signs() -> Signs:
    return measure(ROOT)


def test_no_class_has_become_larger(signs: Signs) -> None:
    assert signs.lines_of_largest_class[0] <= 229, signs.lines_of_largest_class
    assert signs.methods_of_largest_class[0] <= 28, signs.methods_of_largest_class


def test_what_is_set_late_is_what_the_class_bodies_declare(signs: Signs) -> None:
    assert signs.late_attributes == [
        "BaseTrainer.train_setup",
        "BaseTrainer.compiled",
        "RestoreableJob.attempt",
        "RestoreableJob.checkpointer",
    ]


def test_each_import_by_string_has_its_reason(signs: Signs) -> None:
    reasons = {
        "experiments/model/platform.py": "the kernel of a platform that is not here",
        "runner/__init__.py": "public classes, without jax until they are asked for",
        "runner/__main__.py": "the commands, each of which brings what it needs",
        "runner/spec/imports.py": "the user's own job, and packages that are extras, such as pyarrow",
        "runner/storage/url.py": "the client of a cloud, which is an extra",
        "runner/metrics/writers.py": "wandb, which takes a second",
    }
    assert {place.rpartition(":")[0] for place in signs.imports_by_string} == set(reasons)
    assert len(signs.imports_by_string) <= 8


def test_no_function_is_long(signs: Signs) -> None:
    assert signs.long_functions == []


def test_dictionaries_of_anything_become_fewer(signs: Signs) -> None:
    assert signs.any_dictionaries <= 40


def test_an_attribute_that_a_base_class_has_made_is_not_late() -> None:
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
