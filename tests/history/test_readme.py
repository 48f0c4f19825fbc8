"""The category table of the README matches the code."""

import re
from pathlib import Path

import runner.history
from runner.distributed.clock import TimeCategory

PAGE = Path(runner.history.__file__).with_name("README.md")


def test_the_category_table_of_the_readme_matches_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert told == {category.value: category.meaning.removesuffix(".") for category in TimeCategory}
