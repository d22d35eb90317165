"""Mean, pass@k, coverage and intervals against worked examples and brute force."""

from __future__ import annotations

import ast
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pier
from pier.figures import GradedTrial, compare, confidence, pass_at_k, summarise


def _trials(**tasks: list[float | None]) -> list[GradedTrial]:
    return [(task, None if value is None else {"reward": value}) for task, values in tasks.items() for value in values]


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
    summary = summarise([("a", {"tests": 1, "style": 0.5}), ("b", {"tests": 0})])
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


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=2, max_size=8))
def test_an_interval_holds_the_mean(groups: list[list[float]]) -> None:
    values = [value for group in groups for value in group]
    found = confidence(groups)
    assert found is not None
    mean = math.fsum(values) / len(values)
    assert 0 <= found.low <= mean + 1e-9 and mean - 1e-9 <= found.high <= 1


def test_a_comparison_counts_only_tasks_with_verdicts_in_both() -> None:
    found = compare({"a": [1, 1], "b": [0], "c": [1], "d": []}, {"a": [1, 0], "b": [1], "d": [1], "e": [1]})
    assert found.n_paired == 2 and found.difference == pytest.approx(0.25)
    assert (found.wins, found.losses, found.p_value) == (1, 1, 1.0)
    rows = {row.task: (row.first, row.second, row.difference) for row in found.tasks}
    assert rows == {
        "a": (1, 0.5, -0.5),
        "b": (0, 1, 1),
        "c": (1, None, None),
        "d": (None, 1, None),
        "e": (None, 1, None),
    }


def test_a_paired_interval_of_a_known_case() -> None:
    """Bonett and Price's interval for 59 discordant of 80 pairs, 43 to 16."""
    first = {str(n): [float(n < 16)] for n in range(80)}
    second = {str(n): [float(16 <= n < 59)] for n in range(80)}
    found = compare(first, second)
    assert found.difference == pytest.approx(27 / 80) and found.interval is not None
    centre, spread = 27 / 82, (44 + 17) / 82
    half = 1.959964 * math.sqrt((spread - centre**2) / 82)
    assert (found.interval.low, found.interval.high) == (pytest.approx(centre - half), pytest.approx(centre + half))
    assert found.p_value == pytest.approx(2 * sum(math.comb(59, k) for k in range(17)) / 2**59)


def test_equal_tasks_do_not_make_a_difference_certain() -> None:
    found = compare({"a": [1], "b": [1]}, {"a": [1], "b": [1]})
    assert (
        found.difference == 0 and found.interval is not None and found.interval.low < -0.3 < 0.3 < found.interval.high
    )
    assert compare({"a": [1]}, {"a": [0]}).interval is None
    assert compare({}, {}).difference is None


def test_an_interval_of_one_task_is_newcombes() -> None:
    """The tenth method of Newcombe (1998) for 56/70 against 48/80."""
    (row,) = compare({"a": [1.0] * 48 + [0.0] * 32}, {"a": [1.0] * 56 + [0.0] * 14}).tasks
    assert row.interval is not None
    assert (row.interval.low, row.interval.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))


def test_rewards_beyond_one_have_an_interval_too() -> None:
    found = compare({"a": [10.0], "b": [20.0]}, {"a": [12.0], "b": [24.0]})
    assert found.interval is not None and found.interval.low == pytest.approx(3 - 1.96, abs=1e-3)


def _computes_a_figure(node: ast.AST) -> bool:
    """Whether code averages, estimates pass@k, or divides a reward or a cost."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "statistics" in [getattr(node, "module", None), *(each.name for each in node.names)]
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "math.comb"
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    return bool(re.match(r"(math\.)?f?sum\(", left) or right.startswith("len(") or re.search("reward|cost|usd", left))


def _computed_in(source: str) -> list[int]:
    return [getattr(node, "lineno", 0) for node in ast.walk(ast.parse(source)) if _computes_a_figure(node)]


def test_no_other_module_computes_a_mean_of_rewards_or_costs() -> None:
    root = Path(pier.__file__).parent
    found = {path.relative_to(root).as_posix(): _computed_in(path.read_text()) for path in root.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} == {"figures.py"}, found


@pytest.mark.parametrize(
    "code",
    [
        "sum(rewards) / n",
        "math.fsum(x) / n",
        "total / len(rows)",
        "row['cost']['known'] / done",
        "import statistics",
        "math.comb(4, 2)",
    ],
)
def test_a_figure_computed_elsewhere_is_found(code: str) -> None:
    assert _computed_in(code)
