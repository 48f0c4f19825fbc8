"""The bucket table of the README matches the code."""

import re
from pathlib import Path

import runner.history
from runner.distributed.clock import TimeBucket

PAGE = Path(runner.history.__file__).with_name("README.md")


def test_the_bucket_table_of_the_readme_matches_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert told == {bucket.value: bucket.meaning.removesuffix(".") for bucket in TimeBucket}
