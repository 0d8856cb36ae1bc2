"""Random walks, found and shrunk by Hypothesis. A longer one: `python benchmarks/random_walk.py`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from conftest import FILLS, POLICIES, RECURRENT_FAMILIES
from walk import EngineWalk, Setting, StateWalk

NUMBERS = st.integers(0, 300)
COMMON = {
    "family": st.sampled_from(RECURRENT_FAMILIES),
    "policy": st.sampled_from(POLICIES),
    "fill": st.sampled_from(FILLS),
}


class StateMachine(RuleBasedStateMachine):
    @initialize(setting=st.builds(Setting, **COMMON, depth=st.integers(0, 5), num_slots=st.integers(1, 3)))
    def begin(self, setting: Setting) -> None:
        self.walk = StateWalk(setting)

    @rule(operation=st.sampled_from(StateWalk.OPERATIONS), slot=st.integers(0, 2), a=NUMBERS, b=NUMBERS)
    def operate(self, operation: str, slot: int, a: int, b: int) -> None:
        self.walk.do(operation, slot, a, b)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        setting=st.builds(
            Setting,
            **COMMON,
            depth=st.integers(0, 5),
            num_slots=st.integers(1, 3),
            chunk=st.sampled_from([1, 5, 64]),
            prefix_bytes=st.sampled_from([0, 100_000, 10_000_000]),
            drafter=st.sampled_from(["none", "ngram", "own model", "other model", "wrong", "now and then"]),
        )
    )
    def begin(self, setting: Setting) -> None:
        self.walk = EngineWalk(setting)

    @rule(operation=st.sampled_from(EngineWalk.OPERATIONS), which=st.integers(0, 5), a=NUMBERS, b=NUMBERS)
    def operate(self, operation: str, which: int, a: int, b: int) -> None:
        self.walk.do(operation, which, a, b)


BOUNDED = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStateWalk = StateMachine.TestCase
TestStateWalk.settings = BOUNDED
TestEngineWalk = EngineMachine.TestCase
TestEngineWalk.settings = BOUNDED
