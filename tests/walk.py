"""Random walks through everything that can happen to a state, checked after each operation.

`StateWalk` walks over slots of a runner, `EngineWalk` over requests of an engine. Who drives them (Hypothesis
in the tests, a generator in benchmarks/random_walk.py) chooses operation and numbers; every number is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from checks import check_logits, check_next, check_slots, check_state, check_tokens
from conftest import TABLE, model, model_file
from drafters import AlwaysWrong, EverySecondStep
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Generation, Request
from redraft.errors import StateError
from redraft.runner import Runner
from redraft.speculate import Drafter, DraftModel, NGram, NoDraft
from redraft.state import Window
from redraft.state.saved import SavedState

LONGEST = 40  # tokens of a sequence; then its slot is reset
VOCABULARY = 264


@dataclass(frozen=True)
class Setting:
    """What stays the same on one walk."""

    family: str = "kimi_k3"
    policy: str = "replay"
    depth: int = 3
    fill: int = 0xFF
    drafter: str = "ngram"
    chunk: int = 9
    prefix_bytes: int = 0
    num_slots: int = 3


class StateWalk:
    """Slots of one runner. `histories`: the surviving tokens of each."""

    OPERATIONS = (
        "chunk", "propose", "extend", "mixed", "commit", "drop", "probe", "rollback", "back", "reset", "fork",
        "save_restore",
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.num_operations = 0
        self.num_sequences = setting.num_slots
        self._config = EngineConfig(
            num_slots=setting.num_slots, max_context=64, depth=setting.depth, fill=setting.fill,
            policy=setting.policy,
        )  # type: ignore[arg-type]  # fmt: skip
        self.runner = Runner(model(setting.family), self._config, TABLE)
        for slot in range(setting.num_slots):
            self.runner.pool.reset(slot)
        self.histories: list[list[int]] = [[] for _ in range(setting.num_slots)]
        self._rounds: list[list[int]] = [[] for _ in range(setting.num_slots)]
        self._drawn = 0

    def do(self, operation: str, slot: int, a: int, b: int) -> None:
        """One operation on `slot` with two numbers, then all checks."""
        slot %= self.setting.num_slots
        if len(self.histories[slot]) > LONGEST:
            operation = "reset"
        getattr(self, f"_{operation}")(slot, a, b)
        self.num_operations += 1
        for other, history in enumerate(self.histories):
            check_state(self.setting.family, self.runner, other, history)
            assert self.runner.pool.num_proposed(other) == len(self._rounds[other])

    def _tokens(self, count: int) -> list[int]:
        first, self._drawn = self._drawn, self._drawn + count
        return [(7 * i * i + 3 * i + 11) % VOCABULARY for i in range(first, first + count)]

    def _run(self, windows: list[Window], *, extend: bool = False) -> None:
        """Run windows; those that advance are committed at once, the others stay proposed."""
        logits = self.runner.forward(windows, extend=extend)
        for window, rows in zip(windows, logits, strict=True):
            slot = window.slot
            self._rounds[slot] = [*(self._rounds[slot] if extend else []), *window.tokens]
            check_logits(self.setting.family, rows[-1], self.histories[slot] + self._rounds[slot])
            if window.advance or self.setting.depth == 0:
                self._take(slot, len(window.tokens))

    def _take(self, slot: int, count: int) -> None:
        self.runner.commit([slot], [count])
        self.histories[slot] += self._rounds[slot][:count]
        self._rounds[slot] = []

    def _chunk(self, slot: int, a: int, b: int) -> None:
        self._run([Window(slot, self._tokens(1 + a % 12), num_logits=1, advance=True)])

    def _propose(self, slot: int, a: int, b: int) -> None:
        self._run([Window(slot, self._tokens(1 + a % (self.setting.depth + 1)), num_logits=1)])

    def _extend(self, slot: int, a: int, b: int) -> None:
        """A draft model's way: several windows before a commit."""
        if not self._rounds[slot]:
            self._propose(slot, b, a)
        room = self.setting.depth + 1 - len(self._rounds[slot])
        if room > 0 and self._rounds[slot]:
            self._run([Window(slot, self._tokens(1 + a % room), num_logits=1)], extend=True)

    def _mixed(self, slot: int, a: int, b: int) -> None:
        """A prompt chunk, and windows of other lengths on the other slots, in one pass; then some of it."""
        windows = [Window(slot, self._tokens(1 + a % 9), num_logits=1, advance=True)]
        for i in range(1, self.setting.num_slots):
            other = (slot + i) % self.setting.num_slots
            length = 1 + (b + i) % (self.setting.depth + 1)
            windows.append(Window(other, self._tokens(length), num_logits=1))
        self._run(windows)
        for window in windows[1:]:
            if self._rounds[window.slot]:
                self._commit(window.slot, a, b)

    def _commit(self, slot: int, a: int, b: int) -> None:
        if not self._rounds[slot]:
            self._propose(slot, b, a)
        if self._rounds[slot]:
            self._take(slot, 1 + a % len(self._rounds[slot]))

    def _drop(self, slot: int, a: int, b: int) -> None:
        self._propose(slot, a, b)
        if self._rounds[slot]:
            self.runner.rollback(slot, len(self.histories[slot]))
            self._rounds[slot] = []

    def _probe(self, slot: int, a: int, b: int) -> None:
        if self.setting.depth:
            token = a % VOCABULARY
            check_next(self.setting.family, self.runner, slot, self.histories[slot], token)
            self._rounds[slot] = [token]

    def _rollback(self, slot: int, a: int, b: int) -> None:
        """To where the policy can, or a refusal that changes nothing."""
        position = len(self.histories[slot]) - a % (self.setting.depth + 3)
        status = self.runner.pool.status(slot)
        if self.runner.can_rollback(slot, position):
            self.runner.rollback(slot, position)
            del self.histories[slot][position:]
            self._rounds[slot] = []
            return
        with pytest.raises(StateError):
            self.runner.rollback(slot, position)
        assert self.runner.pool.status(slot) == status

    def _back(self, slot: int, a: int, b: int) -> None:
        """Behind a commit, while the policy still holds it; twice."""
        self._commit(slot, b, a)
        self._rollback(slot, a, b)
        self._rollback(slot, b, a)

    def _reset(self, slot: int, a: int, b: int) -> None:
        self.runner.pool.reset(slot)
        self.histories[slot], self._rounds[slot] = [], []
        self.num_sequences += 1

    def _fork(self, slot: int, a: int, b: int) -> None:
        """The copy of a slot with whatever is pending and proposed there, onto a dirty one."""
        other = (slot + 1 + a % max(self.setting.num_slots - 1, 1)) % self.setting.num_slots
        if other != slot:
            self.runner.pool.write(other, self.runner.pool.read(slot))
            self.histories[other], self._rounds[other] = list(self.histories[slot]), []
            self.num_sequences += 1

    def _save_restore(self, slot: int, a: int, b: int) -> None:
        """Through bytes, onto a slot of this runner or of a new one with other settings."""
        history = self.histories[slot]
        config = self._config
        saved = SavedState("", "", config.kv_type, config.compute, history, self.runner.pool.read(slot), {})
        value = SavedState.from_bytes(saved.to_bytes()).value
        policy = ("replay", "snapshot", "checkpoint")[a % 3]
        other = Runner(model(self.setting.family), replace(config, policy=policy, depth=1 + b % 4), TABLE)  # type: ignore[arg-type]
        other.pool.write(0, value)
        check_state(self.setting.family, other, 0, history)
        check_next(self.setting.family, other, 0, history, b % VOCABULARY)
        self.runner.pool.write(slot, value)
        self._rounds[slot] = []


GREEDY = SamplingParams(max_tokens=9)
SAMPLED = SamplingParams(
    max_tokens=9, temperature=0.9, top_k=50, repetition_penalty=1.2, presence_penalty=0.2, seed=5
)


class EngineWalk:
    """Requests of one engine, with whatever may be done to them between steps."""

    OPERATIONS = (
        "submit", "submit", "step", "step", "step", "step", "run", "cancel", "preempt", "fork",
        "save_restore", "restart", "follow", "close",
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.num_operations = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.engine = self._made(setting)
        self._live: list[Generation] = []
        self._checked: dict[int, int] = {}  # tokens of a live generation known to be right, by identity
        self._said: list[list[int]] = [[(5 * i + 2) % VOCABULARY for i in range(24)]]

    def _made(self, setting: Setting) -> Engine:
        config = EngineConfig(
            num_slots=setting.num_slots, max_context=64, depth=setting.depth, policy=setting.policy,
            prefill_chunk=setting.chunk, prefix_bytes=setting.prefix_bytes, prefix_interval=8,
            fill=setting.fill,
        )  # type: ignore[arg-type]  # fmt: skip
        makers: dict[str, Callable[[], Drafter]] = {
            "none": NoDraft,
            "ngram": lambda: NGram(2, 1),
            "own model": lambda: DraftModel(model(setting.family), config, TABLE),
            "other model": lambda: DraftModel(model("llama"), config, TABLE),
            "wrong": AlwaysWrong,
            "now and then": EverySecondStep,
        }
        tokenizer = model_file(setting.family).require_tokenizer()
        drafter = makers[setting.drafter]()
        return Engine(model(setting.family), config, TABLE, tokenizer=tokenizer, drafter=drafter)

    def do(self, operation: str, which: int, a: int, b: int) -> None:
        """One operation, then all checks."""
        getattr(self, f"_{operation}")(which, a, b)
        self.num_operations += 1
        for generation in self._live:
            known = self._checked.get(id(generation), 0)
            self._checked[id(generation)] = check_tokens(self.setting.family, generation, known, TABLE)
            self.num_tokens += self._checked[id(generation)] - max(known, generation.num_prompt)
        for generation in [g for g in self._live if g.finish_reason is not None]:
            self._live.remove(generation)
            self._said = [*self._said[-5:], generation.tokens]
        check_slots(self.setting.family, self.engine, self._live)

    def _picked(self, which: int, *, running: bool = False) -> Generation | None:
        candidates = [g for g in self._live if g.slot is not None or not running]
        return candidates[which % len(candidates)] if candidates else None

    def _submit(self, which: int, a: int, b: int) -> None:
        """A prompt that shares more or less with something said before."""
        if len(self._live) >= 6:
            return self._step(which, a, b)
        said = self._said[which % len(self._said)]
        prompt = [*said[: a % min(len(said), 28)], *((a * i + b + 1) % VOCABULARY for i in range(1 + b % 7))]
        return self._ask(prompt, a, b, session=None)

    def _follow(self, which: int, a: int, b: int) -> None:
        """A session's next turn, often from what its slot holds, sometimes from a little before its end."""
        session = f"s{which % 3}"
        parked = self.engine._scheduler.parked(session)
        held = parked[1] if parked else self._said[0][:10]
        end = max(len(held) - (a % 5 if b % 2 else 0), 1)
        busy = any(g.request.session == session for g in self._live)
        if not busy and len(held) <= LONGEST:
            self._ask([*held[:end], (a + 1) % VOCABULARY, (b + 2) % VOCABULARY], a, b, session=session)

    def _ask(self, prompt: list[int], a: int, b: int, session: str | None) -> None:
        params = replace((GREEDY, SAMPLED)[b % 2], max_tokens=1 + (a + b) % 9)
        depth = None if a % 3 else b % (self.setting.depth + 1)
        request = Request(tokens=tuple(prompt), params=params, depth=depth, session=session)
        self._live.append(self.engine.submit(request))
        self.num_sequences += 1

    def _step(self, which: int, a: int, b: int) -> None:
        if self.engine.has_work:
            self.engine.step()

    def _run(self, which: int, a: int, b: int) -> None:
        self.engine.run()

    def _cancel(self, which: int, a: int, b: int) -> None:
        if generation := self._picked(which):
            self.engine.cancel(generation)

    def _preempt(self, which: int, a: int, b: int) -> None:
        if generation := self._picked(which, running=True):
            self.engine.preempt(generation)

    def _fork(self, which: int, a: int, b: int) -> None:
        if (generation := self._picked(which)) and len(self._live) < 6:
            answers = self.engine.fork(generation, 1 + a % 2)
            self._checked |= {id(answer): len(answer.tokens) for answer in answers}
            self._live += answers
            self.num_sequences += len(answers)

    def _save_restore(self, which: int, a: int, b: int) -> None:
        """Onto a slot that somebody used before."""
        if generation := self._picked(which, running=True):
            data, text = self.engine.save(generation), generation.text
            self.engine.cancel(generation)
            self._replace(generation, self.engine.restore(data), text)

    def _replace(self, old: Generation, new: Any, text: str) -> None:
        assert new.tokens == old.tokens
        assert new.text == text
        self._live.remove(old)
        self._live.append(new)
        self._checked[id(new)] = len(new.tokens)

    def _restart(self, which: int, a: int, b: int) -> None:
        """Another engine, policy and depth; all that is unfinished goes on there."""
        if len(self._live) > self.setting.num_slots:
            return
        saved = [(generation, self.engine.save(generation)) for generation in self._live]
        policy = ("replay", "snapshot", "checkpoint")[a % 3]
        self.setting = replace(self.setting, policy=policy, depth=b % 5)
        self.engine = self._made(self.setting)
        for generation, data in saved:
            self._replace(generation, self.engine.restore(data), generation.text)

    def _close(self, which: int, a: int, b: int) -> None:
        self.engine.close_session(f"s{which % 3}")
