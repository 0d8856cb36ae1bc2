"""The experiment: tasks, arms, clocks, figures and the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TABLE, model, model_file
from redraft.config import EngineConfig, SamplingParams
from redraft.decide import (
    Arm,
    ArmPlan,
    RunResult,
    Task,
    Turn,
    builtin_tasks,
    judge,
    measure,
    plan_arms,
    read_tasks,
    summarise,
)
from redraft.decide.clock import ArmClock
from redraft.decide.conversation import Conversation
from redraft.decide.measure import TaskRun, TurnResult, Workload
from redraft.decide.summary import reference_texts
from redraft.decide.tasks import parse_tasks
from redraft.decide.verdict import compare
from redraft.engine import Engine
from redraft.errors import ConfigError, RequestError, TaskFileError
from redraft.loading.chat import ChatTemplate
from redraft.speculate import NGram
from redraft.state import state_buffers

KINDS = {"coding", "rewriting", "knowledge", "random"}


def test_the_built_in_queue() -> None:
    tasks = builtin_tasks()
    assert len(tasks) >= 25
    assert {task.kind for task in tasks} == KINDS
    for kind in KINDS - {"random"}:
        assert sum(task.kind == kind for task in tasks) >= 8
    assert all(len(task.turns) > 1 for task in tasks)


GOOD = {"id": "a", "turns": [{"content": "x", "max_tokens": 3}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "line 1: 'id' must be a text, not ''"),
        ({"id": 7}, "line 1: 'id' must be a text, not 7"),
        ({"turns": []}, "line 1: 'turns' must be a list of at least one turn"),
        ({"turn": []}, "line 1: unknown key 'turn'; known are id, kind, system, turns"),
        ({"turns": ["x"]}, "line 1, turn 1: a turn is a JSON object"),
        ({"turns": [{"max_tokens": 3}]}, "turn 1: needs either text .* or 'random_tokens'"),
        ({"turns": [{"tool": "x", "random_tokens": 2, "max_tokens": 3}]}, "needs either"),
        ({"turns": [{"tool": "", "max_tokens": 3}]}, "'tool' must be a text, not ''"),
        ({"turns": [{"content": "x", "random_tokens": 2, "max_tokens": 3}]}, "needs either"),
        ({"turns": [{"content": "x"}]}, "'max_tokens' must be a whole number from 1 to 100000, not None"),
        ({"turns": [{"content": "x", "max_tokens": 0}]}, "not 0"),
        ({"turns": [{"content": "x", "max_tokens": 2.5}]}, r"not 2\.5"),
        ({"turns": [{"content": "x", "max_tokens": True}]}, "not True"),
        (
            {"turns": [{"content": "x", "max_tokens": 1, "latency_s": -1}]},
            "'latency_s' must be a number from 0",
        ),
        ({"turns": [{"content": "x", "max_tokens": 1, "tools": "y"}]}, "unknown key 'tools'"),
    ],
)
def test_faulty_tasks_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        parse_tasks([json.dumps(GOOD | change)], "tasks")


def test_faulty_task_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="line 2: not valid JSON"):
        parse_tasks([json.dumps(GOOD), "{"], "tasks")
    with pytest.raises(TaskFileError, match="two tasks have the id 'a'"):
        parse_tasks([json.dumps(GOOD)] * 2, "tasks")
    with pytest.raises(TaskFileError, match="holds no task"):
        parse_tasks(["", " "], "tasks")
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskFileError, match="not UTF-8"):
        read_tasks(tmp_path / "bytes")


def task(name: str, *turns: Turn, kind: str = "coding", system: str = "") -> Task:
    return Task(
        name, kind, system, turns or (Turn("the thin " * 5, 0, 6, 0.0), Turn("in the end", 0, 5, 0.3))
    )


def test_a_conversation_extends_its_own_tokens() -> None:
    """The next prompt is all tokens so far plus what the template puts between; the text is the template's
    own.
    """
    tokenizer = model_file("kimi_k3").require_tokenizer()
    made = Conversation(task("a", system="be brief"), tokenizer, 264)
    first = made.first()
    assert tokenizer.chat is not None
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the thin " * 5}]
    assert first == tokenizer.encode(tokenizer.chat.render(messages))
    answer = tokenizer.encode("er")
    second = made.following(1, [*first, *answer], tokenizer.eos_tokens)
    messages += [{"role": "assistant", "content": "er"}, {"role": "user", "content": "in the end"}]
    assert second == tokenizer.encode(tokenizer.chat.render(messages))
    ended = made.following(1, [*first, *answer, tokenizer.eos_tokens[0]], tokenizer.eos_tokens)
    assert ended == second
    assert len(second) + 6 + 5 >= made.max_tokens() >= len(second) + 5


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "<tool>3 passed<user>go on"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('who?') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}",
            "<user>3 passed\n\ngo on",
        ),
        (
            TURNS.replace("for m in messages", "for m in messages if m.role != 'tool'"),
            "<user>3 passed\n\ngo on",
        ),
        (None, "\n3 passed\n\ngo on\n"),
    ],
)
def test_what_a_tool_printed_is_its_own_message_where_there_are_tools(
    template: str | None, expected: str
) -> None:
    class Letters:
        chat = None if template is None else ChatTemplate(template, {})

        def encode(self, text: str, start: bool = True) -> list[int]:
            return [ord(letter) for letter in text]

    turns = (Turn("do it", 0, 4, 0.0), Turn("go on", 0, 4, 0.0, tool="3 passed"))
    made = Conversation(task("t", *turns), Letters(), 264)  # type: ignore[arg-type]
    added = made.following(1, [1, 2], ())[2:]
    assert "".join(map(chr, added)) == expected


def test_random_turns_need_no_tokenizer() -> None:
    turns = (Turn("", 9, 4, 0.0), Turn("", 5, 4, 0.0))
    made = Conversation(task("r", *turns), None, 264)
    first = made.first()
    assert len(first) == 9
    assert first == Conversation(task("r", *turns), None, 264).first()
    assert first != Conversation(task("q", *turns), None, 264).first()
    assert len(made.following(1, first, ())) == 14
    with pytest.raises(RequestError, match="task 'a' is text, but the model has no tokenizer"):
        Conversation(task("a"), None, 264).first()


def test_arms_spend_the_same_bytes() -> None:
    """The third arm has the slots that the speculation's bytes buy, and one more would be too much."""
    spec = model("kimi_k3").spec
    config = EngineConfig(num_slots=4, max_context=64, depth=7)
    plan = plan_arms(spec, config, weight_bytes=1000, draft_buffers=[])
    rollback = {b.name: b.num_bytes for b in state_buffers(spec, config)}
    without = {b.name: b.num_bytes for b in state_buffers(spec, replace(config, depth=0))}
    assert plan.extra_bytes == sum(rollback.values()) - sum(without.values()) > 0
    assert plan.extra_slots == plan.extra_bytes // plan.slot_bytes >= 1
    assert plan.more_slots.config.num_slots == 4 + plan.extra_slots
    assert (
        plan.more_slots.num_bytes <= plan.speculation.num_bytes < plan.more_slots.num_bytes + plan.slot_bytes
    )
    assert [arm.config.depth for arm in plan.arms] == [0, 7, 0]


def test_a_budget_buys_slots_or_is_refused() -> None:
    spec, config = model("llama").spec, EngineConfig(num_slots=2, max_context=64, depth=3)
    plan = plan_arms(spec, config, weight_bytes=0, draft_buffers=[])
    assert (plan.extra_bytes, plan.extra_slots) == (0, 0)  # attention rows alone cost nothing to roll back
    rich = plan_arms(
        spec, config, weight_bytes=0, draft_buffers=[], budget=plan.plain.num_bytes + 3 * plan.slot_bytes
    )
    assert rich.extra_slots == 3
    with pytest.raises(ConfigError, match=r"budget of 5 bytes is below the \d+ that speculation needs"):
        plan_arms(spec, config, weight_bytes=0, draft_buffers=[], budget=5)


def test_an_arm_s_clock_stands_while_others_run() -> None:
    clock = ArmClock()
    assert clock() == clock() == 0
    clock.resume()
    assert 0 < clock() < clock()
    clock.pause()
    still = clock()
    assert clock() == still
    clock.skip_to(still + 5)
    assert clock() == still + 5
    clock.skip_to(1)
    assert clock() == still + 5


def run_queue(
    tasks: list[Task], family: str = "kimi_k3", **settings: Any
) -> tuple[ArmPlan, list[list[RunResult]]]:
    config = EngineConfig(**{"num_slots": 3, "max_context": 192, "depth": 3, **settings})
    plan = plan_arms(model(family).spec, config, weight_bytes=0, draft_buffers=[])
    tokenizer = model_file(family).require_tokenizer()
    workload = Workload(tasks, SamplingParams(temperature=0.8, seed=3), tokenizer, 264)

    def make(arm: Arm, clock: ArmClock) -> Engine:
        drafter = NGram(3, 1) if arm.config.depth else None
        return Engine(model(family), arm.config, TABLE, tokenizer=tokenizer, drafter=drafter, clock=clock)

    runs = []
    for alone in (True, False):
        results, whole = measure(plan.arms, workload, make, alone=alone)
        assert whole
        runs.append(results)
    return plan, runs


def test_every_arm_gives_the_same_texts() -> None:
    tasks = [task(f"t{i}") for i in range(5)] + [
        task("r", Turn("", 20, 6, 0.0), Turn("", 9, 6, 0.1), kind="random")
    ]
    plan, runs = run_queue(tasks)
    reference = reference_texts(runs[0][0])
    assert sorted(reference) == sorted(t.name for t in tasks)
    for results in runs:
        for result in results:
            summary = summarise(result, reference)
            assert (summary.num_completed, summary.failures) == (6, {})
            assert summary.tasks_per_hour > 0
            assert all(run.turns[1].num_cached > 0 for run in result.tasks)  # the slot kept its state
            assert all(run.finished_s - run.started_s >= run.task.turns[1].latency_s for run in result.tasks)  # type: ignore[operator]
    assert [r.concurrency for r in runs[0]] == [1, 1, 1]
    assert [r.concurrency for r in runs[1]] == [3, 3, 3 + plan.extra_slots]
    spec = summarise(runs[0][1], reference)
    assert spec.num_drafted > 0
    assert set(spec.accepted_by_kind) == {"coding", "random"}
    assert spec.peak_bytes["rollback"] > 0
    assert "rollback" not in summarise(runs[0][0], reference).peak_bytes
    assert judge(plan, *runs).decision in {"keep", "drop", "drop above concurrency 1", "undecided"}


def test_an_interrupt_keeps_what_there_is() -> None:
    family, tasks = "kimi_k3", [task(f"t{i}") for i in range(4)]
    config = EngineConfig(num_slots=1, max_context=192, depth=0)
    workload = Workload(tasks, SamplingParams(), model_file(family).require_tokenizer(), 264)
    calls = iter(range(1000))

    def make(arm: Arm, clock: ArmClock) -> Engine:
        made = Engine(model(family), arm.config, TABLE, tokenizer=workload.tokenizer, clock=clock)
        step = made.step

        def stepping() -> list[Any]:
            if next(calls) == 30:
                raise KeyboardInterrupt
            return step()

        made.step = stepping  # type: ignore[method-assign]
        return made

    results, whole = measure([Arm("a", config, 0)], workload, make, alone=True)
    assert not whole
    summary = summarise(results[0], reference_texts(results[0]))
    assert 0 < summary.num_completed < 4
    assert summary.failures == {"unfinished": 1}


def turn(tokens: tuple[int, ...] = (1, 2, 3), **changes: Any) -> TurnResult:
    values = {
        "tokens": tokens, "text": "", "finish_reason": "length", "submitted_s": 1.0, "first_token_s": 1.5,
        "last_token_s": 2.5, "num_prompt": 4, "num_cached": 0, "num_drafted": 4, "num_accepted": 1,
        "num_steps": 1,
    }  # fmt: skip
    return TurnResult(**(values | changes))


def result(seconds: list[float], concurrency: int, *, name: str = "arm", wrong: int = 0) -> RunResult:
    runs = []
    for i, s in enumerate(seconds):
        tokens = (9,) if i < wrong else (1, 2, 3)
        runs.append(TaskRun(task(f"t{i}"), started_s=0.0, turns=[turn(tokens)], finished_s=s))
    arm = Arm(name, EngineConfig(num_slots=concurrency, depth=0), 0)
    return RunResult(arm, concurrency, tuple(runs), sum(seconds), {"weights": 1}, 0)


def test_figures() -> None:
    """TTFT 0.5 s, TPOT (2.5 − 1.5) / 2; a task with another text does no work and keeps its time."""
    reference = reference_texts(result([1.0, 1.0, 1.0], 1))
    summary = summarise(result([2.0, 3.0, 5.0], 2, wrong=1), reference)
    assert summary.tasks_per_hour == 3600 * 2 * 2 / 10
    assert summary.failures == {"text differs": 1}
    assert summary.ttft_s_median == 0.5
    assert summary.tpot_s_median == 0.5
    assert summary.task_s_median == 3.0
    assert summary.tokens_per_step == (0 + 2 + 2) / 3
    broken = result([1.0], 1)
    broken.tasks[0].error = "the model's logits are not finite numbers"
    assert summarise(broken, reference).failures == {"the model's logits are not finite numbers": 1}


def noisy(mean: float, seed: int) -> list[float]:
    return (mean * np.random.default_rng(seed).uniform(0.9, 1.1, 25)).tolist()


def fake_plan(extra_slots: int) -> ArmPlan:
    config = EngineConfig(num_slots=4)
    arms = [Arm(name, config, 0) for name in ("no speculation", "speculation", "more slots")]
    return ArmPlan(*arms, extra_bytes=2**30, slot_bytes=2**28, extra_slots=extra_slots)


@pytest.mark.parametrize(
    ("alone", "full", "more", "decision"),
    [
        (0.5, 0.8, 1.0, "keep"),
        (1.4, 1.3, 1.0, "drop"),
        (0.6, 1.5, 1.0, "drop above concurrency 1"),
        (0.6, 0.9, 0.7, "drop above concurrency 1"),  # better than nothing, worse than the slots it costs
        (1.0, 1.0, 1.0, "undecided"),
        (0.6, 1.0, 1.0, "undecided"),
        (1.4, 0.6, 1.0, "undecided"),
    ],
)
def test_verdicts(alone: float, full: float, more: float, decision: str) -> None:
    """Times relative to the arm without speculation; 25 tasks with 10 % noise each."""
    at_one = [result(noisy(1, 1), 1), result(noisy(alone, 2), 1), result(noisy(1, 3), 1, name="more slots")]
    at_four = [
        result(noisy(4, 4), 4),
        result(noisy(4 * full, 5), 4),
        result(noisy(4 * more, 6), 4, name="more slots"),
    ]
    verdict = judge(fake_plan(extra_slots=1), at_one, at_four)
    assert verdict.decision == decision
    assert "speculation costs 1.00 GiB, which buys 1 more slot;" in verdict.reason
    assert abs(verdict.noise - 1) < 0.1


def test_a_third_arm_without_slots_is_no_rival() -> None:
    at_one = [result(noisy(1, 1), 1), result(noisy(0.6, 2), 1), result(noisy(1, 3), 1)]
    at_four = [result(noisy(4, 4), 4), result(noisy(3, 5), 4), result(noisy(1, 6), 4)]
    assert judge(fake_plan(extra_slots=0), at_one, at_four).decision == "keep"


def test_more_slots_count_by_their_concurrency() -> None:
    """Eight slots whose tasks take twice as long complete as many tasks an hour as four."""
    reference = reference_texts(result([1.0] * 25, 1))
    comparison = compare(result([1.0] * 25, 4), result([2.0] * 25, 8), reference)
    assert (comparison.ratio, comparison.low, comparison.high) == (1.0, 1.0, 1.0)


def test_an_interval_needs_more_than_one_task() -> None:
    reference = reference_texts(result([1.0], 1))
    comparison = compare(result([1.0], 1), result([2.0], 1), reference)
    assert (comparison.ratio, comparison.decision) == (2.0, "undecided")
    nothing = compare(
        result([1.0, 1.0], 1, wrong=2), result([1.0, 1.0], 1), reference_texts(result([1.0, 1.0], 1))
    )
    assert (nothing.ratio, nothing.decision) == (0.0, "drop")
    assert math.isfinite(nothing.high)
