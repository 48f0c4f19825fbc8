"""Block schedule of the TPU kernel: every query visits every visible key once, with masks in partial blocks."""

import numpy as np
import pytest

from experiments.model.tpu_attention import DONE, FIRST, LAST, LONG_STEP, CausalBlocks

CASES = [
    (CausalBlocks(block, window), length)
    for block, length in ((128, 128), (128, 640), (256, 1024), (384, 1152), (1024, 2048))
    for window in (None, 1, 127, 128, 129, 255, 256, 257, 300, 384, 512, 640, 1000, 1024)
]


@pytest.mark.daily(24)
@pytest.mark.parametrize(("causal", "length"), CASES)
def test_every_query_visits_every_visible_key_once(causal: CausalBlocks, length: int) -> None:
    walk = causal.walk(length)
    met = np.zeros((length, length), int)
    for query, key in zip(walk.queries.tolist(), walk.keys.tolist(), strict=True):
        for step in causal.steps(query - key):
            queries = query * causal.block + np.arange(causal.block)[step.queries]
            keys = key * causal.block + np.arange(causal.block)[step.keys]
            distances = queries[:, None] - keys
            seen = (distances >= 0) & (distances < (causal.window or length))
            if step.ahead is None:
                assert seen.all()
                assert len(keys) <= LONG_STEP
            else:
                assert step.ahead == queries[0] - keys[0]
            assert seen.any()
            met[np.ix_(queries, keys)] += seen
    distances = np.subtract.outer(np.arange(length), np.arange(length))
    assert (met == ((distances >= 0) & (distances < (causal.window or length)))).all()


@pytest.mark.parametrize(("causal", "length"), CASES)
def test_flags_mark_first_and_last_visits(causal: CausalBlocks, length: int) -> None:
    walk, number = causal.walk(length), length // causal.block
    assert (np.diff(walk.queries) >= 0).all()
    for block in range(number):
        (of_queries,), (of_keys,) = np.nonzero(walk.queries == block), np.nonzero(walk.keys == block)
        # The keys at the positions of the query block, which the kernel rotates, come last.
        assert walk.keys[of_queries[-1]] == block
        assert np.flatnonzero(walk.flags[of_queries] & FIRST).tolist() == [0]
        assert np.flatnonzero(walk.flags[of_queries] & LAST).tolist() == [len(of_queries) - 1]
        assert np.flatnonzero(walk.flags[of_keys] & DONE).tolist() == [len(of_keys) - 1]
    done = np.flatnonzero(walk.flags & DONE)
    # The blocks of keys are completed in their order, which is the order of writing.
    assert walk.keys[done].tolist() == list(range(number))
    assert all(walk.written[place] == walk.keys[done[done >= place][0]] for place in range(len(walk.flags)))


def test_few_masked_scores_are_computed() -> None:
    """Check the share of computed scores for 1,024 positions, of which half are visible."""
    assert CausalBlocks(1024).num_scores(1024) == 36 * 128 * 128
    assert CausalBlocks(512).num_scores(1024) == (2 * 10 + 16) * 128 * 128
