"""The drafters that `redraft verify` uses, for the vocabulary of the fixtures."""

from __future__ import annotations

from functools import partial

from redraft.verify import drafters

VOCABULARY_SIZE = 264

AlwaysWrong = partial(drafters.AlwaysWrong, VOCABULARY_SIZE)
EverySecondStep = drafters.EverySecondStep
Prophet = partial(drafters.KnownFuture, vocab_size=VOCABULARY_SIZE)
