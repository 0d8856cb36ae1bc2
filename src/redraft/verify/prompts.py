"""Texts to send: seeded, so that a run can be repeated; half invite copying, where lookup drafts most."""

from __future__ import annotations

import random

WORDS = (
    "river", "stone", "winter", "garden", "letter", "window", "market", "bridge", "summer", "forest",
    "village", "morning", "paper", "silver", "music", "harbor", "mountain", "engine", "station", "number",
    "circle", "bottle", "island", "coffee", "planet", "doctor", "carpet", "basket", "candle", "ladder",
    "mirror", "button", "pocket", "saddle", "tunnel", "valley", "wagon", "yellow", "zebra", "anchor",
)  # fmt: skip
CODE_WORDS = (
    "falcon", "umbrella", "trumpet", "walnut", "compass", "lantern", "pepper", "violin",
)  # fmt: skip
SUBJECTS = (
    "how bread is baked",
    "why the sky is blue",
    "the rules of chess",
    "how a canal lock works",
    "what a tax return is",
    "how bees find flowers",
    "why ships float",
    "how paper is made",
)


def passage(num_words: int, seed: int) -> str:
    """Common words in an arbitrary order."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def copying(n: int) -> str:
    """A prompt that repeats itself: what comes next stands in it already."""
    line = passage(8, seed=100 + n)
    return f"Copy the line. {line}. {line}. {line}."


def telling(n: int) -> str:
    """An open prompt: little of what comes next stands in it."""
    return f"In plain words, {SUBJECTS[n % len(SUBJECTS)]}:"


def greedy_prompts(count: int) -> list[str]:
    """Half to copy, half to tell."""
    return [copying(n // 2) if n % 2 == 0 else telling(n // 2) for n in range(count)]


def with_code_word(n: int) -> str:
    """A prompt around a word of its own, which no other has."""
    word = code_word(n)
    return f"The code word is {word}. {passage(4, seed=n)} {word} {word}. Repeat the code word: {word}"


def code_word(n: int) -> str:
    """The n-th code word."""
    round_, index = divmod(n, len(CODE_WORDS))
    return CODE_WORDS[index] + (str(round_ + 1) if round_ else "")
