"""Mean, pass@k, coverage and intervals against worked examples and brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.job.results import GradedTrial, confidence, pass_at_k, summarise

pytestmark = pytest.mark.plain


def _trials(**tasks: list[float | None]) -> list[GradedTrial]:
    return [
        GradedTrial(task, None if value is None else {"reward": value})
        for task, values in tasks.items()
        for value in values
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_samples_with_a_success(attempts: list[bool], k: int) -> None:
    if k > len(attempts):
        with pytest.raises(ValueError):
            pass_at_k(len(attempts), sum(attempts), k)
        return
    samples = list(itertools.combinations(attempts, k))
    expected = sum(any(sample) for sample in samples) / len(samples)
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(expected)


def test_k_starts_at_one_and_ends_at_the_fewest_verdicts_of_a_task() -> None:
    summary = summarise(_trials(a=[1, 0, 0, 1], b=[1, 1, None, 0]))
    assert list(summary.pass_at_k) == [1, 2]
    assert summary.pass_at_k[1] == pytest.approx((2 / 4 + 2 / 3) / 2)


def test_a_missing_verdict_is_no_zero() -> None:
    summary = summarise(_trials(a=[1, None], b=[1]))
    assert summary.mean == {"reward": 1}
    assert (summary.n_trials, summary.n_verdicts) == (3, 2)
    assert summary.coverage == pytest.approx(2 / 3)


def test_each_reward_key_has_its_own_mean_and_pass_at_k_is_left_out() -> None:
    summary = summarise([GradedTrial("a", {"tests": 1, "style": 0.5}), GradedTrial("b", {"tests": 0})])
    assert summary.mean == {"tests": 0.5, "style": 0.5}
    assert summary.pass_at_k == {}


def test_pass_at_k_needs_zeros_and_ones() -> None:
    assert summarise(_trials(a=[0.5, 1])).pass_at_k == {}


def test_no_trials_and_no_verdicts() -> None:
    assert summarise([]).coverage == 0
    assert summarise(_trials(a=[None])).mean == {}


def test_wilson_interval_of_a_known_case() -> None:
    found = confidence([[1]] * 8 + [[0]] * 2)
    assert found is not None and found.method == "wilson"
    assert (found.low, found.high) == (pytest.approx(0.4901, abs=1e-3), pytest.approx(0.9433, abs=1e-3))


def test_all_successes_do_not_make_certain() -> None:
    found = confidence([[1]] * 5)
    assert found is not None and found.low < 0.6 and found.high == 1


def test_attempts_of_one_task_are_not_counted_as_independent() -> None:
    alone = confidence([[1]] * 4 + [[0]] * 4)
    repeated = confidence([[1] * 50] * 4 + [[0] * 50] * 4)
    assert alone is not None and repeated is not None
    assert repeated.method == "clustered"
    assert repeated.high - repeated.low > 0.5


def test_many_attempts_at_few_tasks_do_not_make_certain() -> None:
    found = confidence([[0] * 100] * 2)
    assert found is not None and found.low == 0 and found.high > 0.5


def test_one_fraction_has_no_interval() -> None:
    assert confidence([[0.5]]) is None
    assert confidence([]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=2, max_size=8))
def test_an_interval_holds_the_mean(groups: list[list[float]]) -> None:
    values = [value for group in groups for value in group]
    found = confidence(groups)
    assert found is not None
    mean = math.fsum(values) / len(values)
    assert 0 <= found.low <= mean + 1e-9 and mean - 1e-9 <= found.high <= 1
