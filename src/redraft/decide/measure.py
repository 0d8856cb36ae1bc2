"""Running the queue: each arm a closed loop of agents, all arms in turns on one machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil

from redraft.config import SamplingParams
from redraft.decide.arms import Arm, EngineFactory
from redraft.decide.clock import ArmClock
from redraft.decide.conversation import Conversation
from redraft.decide.tasks import Task
from redraft.engine import Event, FinishReason, Generation, Request
from redraft.loading import Tokenizer
from redraft.state import bytes_by_category

_TURN_OF_AN_ARM_S = 0.5  # of computing, before the next arm has its turn


@dataclass(frozen=True)
class TurnResult:
    """One answer. Times are the arm's own seconds."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    submitted_s: float
    first_token_s: float | None
    last_token_s: float | None
    num_prompt: int
    num_cached: int
    num_drafted: int
    num_accepted: int
    num_steps: int


@dataclass
class TaskRun:
    """One task under way or done."""

    task: Task
    started_s: float
    turns: list[TurnResult] = field(default_factory=list)
    finished_s: float | None = None
    error: str = ""

    @property
    def complete(self) -> bool:
        """Whether every turn was answered."""
        return self.finished_s is not None and not self.error


@dataclass(frozen=True)
class RunResult:
    """One arm at one concurrency."""

    arm: Arm
    concurrency: int
    tasks: tuple[TaskRun, ...]  # those that began, in the order of the queue
    wall_s: float
    bytes_by_category: dict[str, int]
    resident_bytes: int


@dataclass(frozen=True)
class Workload:
    """What every arm is given."""

    tasks: Sequence[Task]
    params: SamplingParams
    tokenizer: Tokenizer | None
    vocab_size: int


class _ArmRun:
    """One arm at one concurrency, run a little at a time."""

    def __init__(self, arm: Arm, concurrency: int, workload: Workload, factory: EngineFactory) -> None:
        self.arm = arm
        self.concurrency = concurrency
        self._workload = workload
        self._clock = ArmClock()
        self._engine = factory(arm, self._clock)
        self._queue = deque(workload.tasks)
        self._running: dict[int, tuple[TaskRun, Conversation]] = {}  # by number of the generation
        self._waiting: list[tuple[float, TaskRun, Conversation, list[int]]] = []  # for a tool, until then
        self.runs: list[TaskRun] = []
        self._resident_bytes = 0

    @property
    def num_done(self) -> int:
        return sum(run.finished_s is not None for run in self.runs)

    @property
    def done(self) -> bool:
        return not (self._queue or self._running or self._waiting)

    def work(self, seconds: float) -> None:
        """Compute for so long, or until done."""
        end = self._clock() + seconds
        self._clock.resume()
        try:
            while not self.done and self._clock() < end:
                self._step()
        finally:
            self._clock.pause()
        self._resident_bytes = max(self._resident_bytes, psutil.Process().memory_info().rss)

    def _step(self) -> None:
        self._start_tasks()
        self._end_waits()
        if self._engine.has_work:
            for event in self._engine.step():
                if event.finish_reason is not None:
                    self._end_turn(event)
        elif self._waiting:
            moment = min(until for until, *_ in self._waiting)
            self._clock.pause()
            self._clock.skip_to(moment)
            self._clock.resume()

    def _start_tasks(self) -> None:
        while self._queue and len(self._running) + len(self._waiting) < self.concurrency:
            task = self._queue.popleft()
            run = TaskRun(task, self._clock())
            self.runs.append(run)
            conversation = Conversation(task, self._workload.tokenizer, self._workload.vocab_size)
            self._submit(run, conversation, conversation.first())

    def _end_waits(self) -> None:
        now = self._clock()
        due = [wait for wait in self._waiting if wait[0] <= now]
        self._waiting = [wait for wait in self._waiting if wait[0] > now]
        for _, run, conversation, tokens in due:
            ends = self._workload.tokenizer.eos_tokens if self._workload.tokenizer else ()
            self._submit(run, conversation, conversation.following(len(run.turns), tokens, ends))

    def _submit(self, run: TaskRun, conversation: Conversation, tokens: list[int]) -> None:
        turn = run.task.turns[len(run.turns)]
        params = replace(self._workload.params, max_tokens=turn.max_tokens)
        request = Request(tokens=tuple(tokens), params=params, session=run.task.name)
        self._running[self._engine.submit(request).number] = run, conversation

    def _end_turn(self, event: Event) -> None:
        generation = event.generation
        run, conversation = self._running.pop(generation.number)
        run.turns.append(_turn_result(generation))
        now = self._clock()
        if generation.finish_reason is FinishReason.ERROR:
            run.error = generation.error
        if run.error or len(run.turns) == len(run.task.turns):
            run.finished_s = now
            self._engine.close_session(run.task.name)
            return
        until = now + run.task.turns[len(run.turns)].latency_s
        self._waiting.append((until, run, conversation, generation.tokens))

    def result(self) -> RunResult:
        """What there is so far."""
        return RunResult(
            self.arm,
            self.concurrency,
            tuple(self.runs),
            self._clock(),
            bytes_by_category(self._engine.buffers()),
            self._resident_bytes,
        )


def _turn_result(generation: Generation) -> TurnResult:
    return TurnResult(
        tokens=tuple(generation.output),
        text=generation.text,
        finish_reason=str(generation.finish_reason),
        submitted_s=generation.submitted_s,
        first_token_s=generation.first_token_s,
        last_token_s=generation.last_token_s,
        num_prompt=generation.num_prompt,
        num_cached=generation.num_cached,
        num_drafted=generation.num_drafted,
        num_accepted=generation.num_accepted,
        num_steps=generation.num_steps,
    )


Progress = Callable[[str, int], None]  # arm, tasks done


def measure(
    arms: Sequence[Arm],
    workload: Workload,
    factory: EngineFactory,
    *,
    alone: bool,
    on_progress: Progress = lambda *_: None,
) -> tuple[list[RunResult], bool]:
    """Run the queue on every arm, the arms in turns of half a second, each with its own clock.

    `alone`: concurrency 1; else each arm at its number of slots. → results, and whether they are all there:
    an interrupt ends the measurement with what there is.
    """
    runs = [_ArmRun(arm, 1 if alone else arm.config.num_slots, workload, factory) for arm in arms]
    order = deque(runs)
    try:
        while not all(run.done for run in runs):
            for run in order:
                run.work(_TURN_OF_AN_ARM_S)
                on_progress(run.arm.name, run.num_done)
            order.rotate(1)
    except KeyboardInterrupt:
        return [run.result() for run in runs], False
    return [run.result() for run in runs], True
