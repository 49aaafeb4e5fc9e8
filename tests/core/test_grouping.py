"""Items in groups: one call for each key, and results in the order of the items."""

from fp8flax._core.grouping import in_groups


def test_one_call_for_each_key():
    calls = []

    def f(letters, numbers):
        calls.append("".join(letters))
        return [f"{letter}{number}" for letter, number in zip(letters, numbers)]

    assert in_groups(f, [0, 1, 2, 0, 1], "abcde", range(5)) == ["a0", "b1", "c2", "d3", "e4"]
    assert calls == ["ad", "be", "c"]
    assert in_groups(f, [], [], []) == []
