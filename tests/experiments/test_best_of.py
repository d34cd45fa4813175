"""The best of k samples, by hand."""

from fractions import Fraction

from experiments.best_of.run import best_of, table


def test_the_best_of_k_samples_and_the_tasks_that_samples_solve_in_part() -> None:
    assert [best_of(1, 4, k) for k in (1, 2, 4)] == [Fraction(1, 4), Fraction(1, 2), 1]
    assert best_of(0, 4, 4) == 0 and best_of(4, 4, 1) == 1
    rows = [line.split(" | ")[1].split()[0] for line in table({"a": 0, "b": 1, "c": 4, "d": 4}, 4)[2:]]
    assert rows == ["56.2", "62.5", "75.0", "25.0"]
