"""One colour and one letter a group, the same in the terminal and in pictures.

The colours are Okabe and Ito's, which people with any common colour blindness can tell apart; the letters,
and hatching in pictures, serve where there is no colour. https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """How a group is drawn."""

    colour: str
    letter: str
    hatch: str


MARKS: dict[str, Mark] = {
    "weights": Mark("#999999", "W", ""),
    "KV": Mark("#0072B2", "K", ""),
    "recurrent state": Mark("#009E73", "S", ""),
    "conv": Mark("#56B4E9", "C", ""),
    "rollback": Mark("#D55E00", "R", ""),
    "page padding": Mark("#F0E442", "P", ""),
    "prefix store": Mark("#CC79A7", "X", ""),
    "draft weights": Mark("#999999", "w", "///"),
    "draft KV": Mark("#0072B2", "k", "///"),
    "draft state": Mark("#009E73", "s", "///"),
    "scratch": Mark("#E69F00", "t", ""),
    "compute": Mark("#E69F00", "A", "///"),
}
