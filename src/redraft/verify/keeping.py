"""States that leave a slot and come back: saved bytes, and the store of prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from redraft.config import EngineConfig, PolicyName, SamplingParams
from redraft.engine import Engine, Generation, Request
from redraft.speculate import NGram
from redraft.verify.difference import CheckResult, Comparison
from redraft.verify.effort import Effort
from redraft.verify.outputs import TEMPERATURES, alone, sampling
from redraft.verify.trial import Subject

_INTERVAL = 8  # prompt tokens between kept states


def saved_and_restored(subject: Subject, effort: Effort) -> CheckResult:
    """A generation saved under way and restored into a used slot of another engine goes on as if unmoved."""
    compare = Comparison()
    for policy, params in _cases(subject, effort):
        prompt = tuple(subject.tokens(19, seed=19))
        expected = alone(subject, prompt, params)
        source = _engine(subject, policy)
        generation = source.submit(Request(tokens=prompt, params=params))
        while len(generation.output) < 2:
            source.step()
        target = _engine(subject, policy)
        _finish(target, subject.tokens(23, seed=23), params)
        restored = target.restore(source.save(generation))
        assert isinstance(restored, Generation), "a saved generation comes back as one"
        target.run()
        case = f"{policy}, temperature {params.temperature}, saved after {len(generation.output)} tokens"
        compare.tokens(expected, restored.output, slot=restored.slot or 0, position=len(prompt), case=case)
    return compare.result(
        "saved and restored", f"{compare.num_comparisons} generations saved under way, restored elsewhere"
    )


def prefix_hit(subject: Subject, effort: Effort) -> CheckResult:
    """A prompt whose beginning is in the prefix store gives the tokens of a cold run, for every length."""
    compare = Comparison()
    saved = 0
    for policy, params in _cases(subject, effort):
        made = _engine(subject, policy, prefix_bytes=2**31, prefix_interval=_INTERVAL)
        shared = subject.tokens(3 * _INTERVAL, seed=29)
        _finish(made, shared, params)
        for length in range(1, len(shared) + 1, 5):
            prompt = (*shared[:length], *subject.tokens(3, seed=length))
            generation = _finish(made, prompt, params)
            saved += generation.num_cached
            case = f"{policy}, temperature {params.temperature}, {generation.num_cached} tokens kept"
            expected = alone(subject, prompt, params)
            compare.tokens(
                expected, generation.output, slot=generation.slot or 0, position=len(prompt), case=case
            )
    evidence = f"{compare.num_comparisons} prompts, {saved} of their tokens from kept states"
    return compare.result("prefix hit", evidence)


def _cases(subject: Subject, effort: Effort) -> Iterator[tuple[PolicyName, SamplingParams]]:
    for policy in subject.policies:
        for temperature in TEMPERATURES:
            yield policy, sampling(effort, temperature)


def _engine(
    subject: Subject, policy: PolicyName, *, prefix_bytes: int = 0, prefix_interval: int = _INTERVAL
) -> Engine:
    config = EngineConfig(
        num_slots=2, max_context=subject.max_context, depth=subject.depth, policy=policy,
        prefix_bytes=prefix_bytes, prefix_interval=prefix_interval, fill=0xFF,
    )  # fmt: skip
    return Engine(subject.model, config, subject.ops, drafter=NGram(max_match=3, min_match=1))


def _finish(engine: Engine, prompt: list[int] | tuple[int, ...], params: SamplingParams) -> Generation:
    generation = engine.submit(Request(tokens=tuple(prompt), params=params))
    engine.run()
    return generation
