"""How much of each axis the checks walk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """`depths`: for rollback. `prefixes`: lengths of history before a round. `chunks`: how prompts are cut.

    `num_output`: tokens of each generation, in `generation_depths`. `texts`: seeds of the tokens.
    `every_pair_of_loads`: run each drafter at each temperature both alone and among neighbours, else in turn.
    """

    depths: tuple[int, ...]
    prefixes: tuple[int, ...]
    chunks: tuple[int, ...]
    generation_depths: tuple[int, ...]
    num_output: int
    texts: tuple[int, ...]
    every_pair_of_loads: bool


def quick(depth: int) -> Effort:
    """One depth, one text."""
    return Effort(
        depths=(depth,),
        prefixes=(11,),
        chunks=(1, 7, 64),
        generation_depths=(depth,),
        num_output=8,
        texts=(1,),
        every_pair_of_loads=False,
    )


def full(depth: int) -> Effort:
    """Small depths too, histories shorter than a conv window, more cuts, longer outputs, two texts."""
    return Effort(
        depths=tuple(sorted({1, 2, (depth + 1) // 2, depth})),
        prefixes=(1, 2, 3, 11, 32),
        chunks=(1, 2, 7, 16, 63, 64, 65),
        generation_depths=tuple(sorted({1, (depth + 1) // 2, depth})),
        num_output=32,
        texts=(1, 2),
        every_pair_of_loads=True,
    )
