"""docs/cases.md lists every case once, and names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
# The numbers of each kind; those that are missing were duplicates.
CASES = {
    "A": (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 18),
    "B": (1, 2, 3, 4, 5),
    "C": (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14),
    "D": (1, 2, 3, 5, 6, 7, 8, 9),
    "E": (1, 2, 4, 5),
    "F": (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13),
    "G": (1, 2, 3, 4),
    "H": (1, 2, 3, 4, 5, 6),
    "I": (1, 2, 3, 4, 6),
    "J": (1, 3, 4, 5),
    "K": (1, 2),
    "L": (1, 2),
    "M": (1, 2, 3, 4, 5, 6, 7, 9),
}


def test_every_case_is_listed_once() -> None:
    expected = [f"{kind}{number}" for kind, numbers in CASES.items() for number in numbers]
    assert len(expected) == 87
    assert re.findall(r"^\| \[([A-M]\d+)\]\(https://", PAGE, re.MULTILINE) == expected


def test_the_tests_it_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    existing = {
        name
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named - existing == set()
    of_cases = {name for name in existing if re.match(r"test_[a-m]\d+_", name)}
    assert of_cases - named == set()


def test_a_case_has_a_test_or_a_reason() -> None:
    for case, cell in re.findall(r"^\| \[([A-M]\d+)\]\(\S+\) \| (.*) \|$", PAGE, re.MULTILINE):
        assert cell.startswith(("`test_", "No test: ", "Not there yet: ")), case
