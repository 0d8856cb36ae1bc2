"""The whole engine: tokens do not depend on who drafts, how far, or beside whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from redraft.config import EngineConfig, PolicyName, SamplingParams
from redraft.engine import Engine, Generation, Request
from redraft.speculate import Drafter, DraftModel, NGram, NoDraft
from redraft.verify.difference import CheckResult, Comparison
from redraft.verify.drafters import AlwaysWrong, EverySecondStep, KnownFuture
from redraft.verify.effort import Effort
from redraft.verify.trial import Subject

TEMPERATURES = (0.0, 0.8)


class _Case(NamedTuple):
    policy: PolicyName
    drafter: str
    depth: int
    temperature: float
    neighbours: int

    def __str__(self) -> str:
        return (
            f"{self.policy}, drafter {self.drafter}, depth {self.depth}, temperature {self.temperature}, "
            f"{self.neighbours} neighbours"
        )


def drafter_independence(subject: Subject, effort: Effort) -> CheckResult:
    """Through the engine: each output against the same request alone, without speculation, a token a step."""
    compare = Comparison()
    prompts = [subject.tokens(n, seed=n) * 2 for n in (9, 3, 12, 5)][: min(subject.num_slots, 4)]
    truth = {t: [alone(subject, prompt, sampling(effort, t)) for prompt in prompts] for t in TEMPERATURES}
    drafted = accepted = 0
    for case in _cases(subject, effort):
        expected, params = truth[case.temperature], sampling(effort, case.temperature)
        for n, generation in enumerate(_speculate(subject, case, prompts, expected, params)):
            start = generation.num_prompt
            compare.tokens(expected[n], generation.output, slot=n, position=start, case=str(case))
            drafted += generation.num_drafted
            accepted += generation.num_accepted
    evidence = (
        f"{compare.num_comparisons} outputs at temperature 0 and 0.8, each equal to its own without "
        f"speculation; {drafted} tokens drafted, {accepted} accepted"
    )
    return compare.result("drafter independence", evidence)


def _cases(subject: Subject, effort: Effort) -> Iterator[_Case]:
    names = ["none", "n-gram", "always wrong", "every second step", "known future"]
    if subject.draft_model is not None:
        names.append("draft model")
    most = min(subject.num_slots, 4) - 1
    for policy in subject.policies:
        for i, name in enumerate(names):
            for depth in effort.generation_depths[-1:] if name == "none" else effort.generation_depths:
                for j, temperature in enumerate(TEMPERATURES):
                    loads = (0, most) if effort.every_pair_of_loads else ((0, most)[(i + j) % 2],)
                    for neighbours in loads:
                        yield _Case(policy, name, depth, temperature, neighbours)


def sampling(effort: Effort, temperature: float) -> SamplingParams:
    """Parameters of the outputs that are compared."""
    return SamplingParams(max_tokens=effort.num_output, temperature=temperature, seed=11)


def alone(subject: Subject, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The output that every other run is held to: one request, no speculation, a token a step."""
    config = EngineConfig(num_slots=1, max_context=subject.max_context, depth=0)
    return _run(subject, config, NoDraft(), [prompt], params)[0].output


def _speculate(
    subject: Subject,
    case: _Case,
    prompts: Sequence[tuple[int, ...]],
    truth: Sequence[list[int]],
    params: SamplingParams,
) -> list[Generation]:
    asked = prompts[: 1 + case.neighbours]
    config = EngineConfig(
        num_slots=len(asked), max_context=subject.max_context, depth=case.depth, policy=case.policy,
        prefill_chunk=7 if case.neighbours else 64,
    )  # fmt: skip
    known = [[*prompt, *output] for prompt, output in zip(prompts, truth, strict=True)]
    return _run(subject, config, _drafter(subject, config, case.drafter, known), asked, params)


def _drafter(subject: Subject, config: EngineConfig, name: str, known: Sequence[Sequence[int]]) -> Drafter:
    vocab_size = subject.model.spec.vocab_size
    if name == "draft model":
        assert subject.draft_model is not None, "a case for a draft model needs one"
        return DraftModel(subject.draft_model, config, subject.ops, vocab_size)
    if name == "known future":
        return KnownFuture(known, vocab_size)
    if name == "always wrong":
        return AlwaysWrong(vocab_size)
    simple: dict[str, type[Drafter]] = {
        "none": NoDraft,
        "n-gram": NGram,
        "every second step": EverySecondStep,
    }
    return simple[name]()


def _run(
    subject: Subject,
    config: EngineConfig,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
) -> list[Generation]:
    engine = Engine(subject.model, config, subject.ops, drafter=drafter)
    generations = [engine.submit(Request(tokens=prompt, params=params)) for prompt in prompts]
    engine.run()
    return generations
