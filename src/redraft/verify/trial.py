"""A model under test: sequences driven by hand, without the engine, and what they must be equal to.

The only place in this package that commits: a check decides itself which tokens become history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from redraft.config import EngineConfig, PolicyName
from redraft.errors import ConfigError
from redraft.models import Model
from redraft.ops import Array, Ops
from redraft.runner import Runner
from redraft.state import Committed, Window

NUM_KEPT = 16  # reference sequences held at a time; each is as large as one slot


class Reference(NamedTuple):
    """A fresh sequence that only ever saw these tokens: its committed value and next logits [vocab]."""

    value: Committed
    logits: Array


class Subject:
    """The model, its limits, and seeded tokens to feed it.

    Raises `ConfigError` if the model's context is too short for the checks, or nothing would be compared.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        depth: int = 7,
        num_slots: int = 4,
        policies: Sequence[PolicyName] = ("replay",),
        draft_model: Model | None = None,
    ) -> None:
        if num_slots < 2:
            raise ConfigError(f"slots must be at least 2 to compare neighbours, not {num_slots}")
        if depth < 1:
            raise ConfigError(f"depth must be at least 1: with {depth} there is nothing to roll back")
        self.max_context = 160 + 4 * (depth + 1)
        if model.spec.max_context < self.max_context:
            raise ConfigError(
                f"the checks need a context of {self.max_context} tokens, the model has "
                f"{model.spec.max_context}: use a smaller depth"
            )
        self.model = model
        self.ops = ops
        self.depth = depth
        self.num_slots = num_slots
        self.policies = tuple(policies)
        self.draft_model = draft_model
        self.reference = lru_cache(NUM_KEPT)(self._reference)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a state that cannot be truncated."""
        return self.model.spec.num_recurrent_layers > 0

    def tokens(self, count: int, seed: int) -> tuple[int, ...]:
        """Arbitrary tokens of the model's vocabulary, the same for a seed."""
        return tuple(np.random.default_rng(seed).integers(0, self.model.spec.vocab_size, count).tolist())

    def _reference(self, tokens: tuple[int, ...]) -> Reference:
        config = EngineConfig(num_slots=1, max_context=self.max_context, depth=0)
        trial = Trial(self.model, self.ops, config)
        logits = trial.consume({0: tokens})[0]
        return Reference(trial.value(0), logits)

    def trial(self, policy: PolicyName, *, depth: int | None = None, fill: int | None = None) -> Trial:
        """New slots, all reset."""
        config = EngineConfig(
            num_slots=self.num_slots, max_context=self.max_context,
            depth=self.depth if depth is None else depth, policy=policy, fill=fill,
        )  # fmt: skip
        return Trial(self.model, self.ops, config)


class Trial:
    """Slots of one model, driven by hand. Windows are given by slot."""

    def __init__(self, model: Model, ops: Ops, config: EngineConfig) -> None:
        self._runner = Runner(model, config, ops)
        for slot in range(config.num_slots):
            self.reset(slot)

    def consume(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Array]:
        """Make tokens history at once, as a prompt chunk → the logits [vocab] after each."""
        windows = [Window(slot, list(tokens), num_logits=1, advance=True) for slot, tokens in prompts.items()]
        rows = self._runner.forward(windows)
        self.keep({slot: len(tokens) for slot, tokens in prompts.items()})
        return {slot: logits[0] for slot, logits in zip(prompts, rows, strict=True)}

    def propose(self, windows: Mapping[int, Sequence[int]], *, extend: bool = False) -> dict[int, Array]:
        """Verify tokens without committing any → logits [T, vocab] of every row."""
        given = [Window(slot, list(tokens), num_logits=len(tokens)) for slot, tokens in windows.items()]
        return dict(zip(windows, self._runner.forward(given, extend=extend), strict=True))

    def keep(self, counts: Mapping[int, int]) -> None:
        """Commit the first tokens of what each slot has proposed."""
        self._runner.commit(list(counts), list(counts.values()))

    def reset(self, slot: int) -> None:
        """Begin a new sequence."""
        self._runner.pool.reset(slot)

    def value(self, slot: int) -> Committed:
        """A copy of a slot's committed value."""
        return self._runner.pool.read(slot)

    def put(self, slot: int, value: Committed) -> None:
        """Replace a slot's committed value."""
        self._runner.pool.write(slot, value)
