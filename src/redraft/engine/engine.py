"""The engine: requests in, tokens out. The only place that commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from redraft.config import EngineConfig
from redraft.engine.continuation import answer_request, described_request, restore_counters
from redraft.engine.handover import Handover
from redraft.engine.prefix import PrefixStats
from redraft.engine.request import Event, FinishReason, Generation, Request, Status
from redraft.engine.scheduler import Scheduler, Work
from redraft.errors import ConfigError, RequestError, StateError
from redraft.loading import TextStream, Tokenizer
from redraft.models import Model
from redraft.ops import Array, Ops
from redraft.runner import Runner
from redraft.speculate import Drafter, DraftQuery, NoDraft, accept, choose, token_logprob
from redraft.state import Buffer, Window


class Engine:
    """Runs requests on the slots of one model. Not thread-safe; the caller drives it step by step."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        ops: Ops,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.spec = model.spec
        self._ops = ops
        self._runner = Runner(model, config, ops)
        self._drafter = drafter if drafter is not None else NoDraft()
        self._tokenizer = tokenizer
        self._clock = clock
        self._scheduler = Scheduler(
            num_slots=config.num_slots,
            max_context=config.max_context,
            depth=config.depth,
            prefill_chunk=config.prefill_chunk,
            interval=config.prefix_interval if config.prefix_bytes else 0,
        )
        self._handover = Handover(self._runner, self._drafter, self._scheduler, config, ops.arithmetic())
        self._num_submitted = 0
        if config.max_context > model.spec.max_context:
            raise ConfigError(
                f"context {config.max_context} exceeds the model's {model.spec.max_context}: ask for less"
            )

    def submit(self, request: Request) -> Generation:
        """Queue a request. Raises `RequestError` if it can never be served."""
        generation = self._generation(request)
        self._scheduler.add(generation)
        return generation

    def _generation(self, request: Request) -> Generation:
        self._check(request)
        ends = frozenset(request.params.stop_tokens)
        if self._tokenizer is not None and not request.params.ignore_eos:
            ends |= frozenset(self._tokenizer.eos_tokens)
        decoder = TextStream(self._tokenizer) if self._tokenizer is not None else None
        generation = Generation(self._num_submitted, request, decoder, ends, self._clock())
        self._num_submitted += 1
        return generation

    def _check(self, request: Request) -> None:
        vocab, limit = self.spec.vocab_size, self.config.max_context
        params = request.params
        if not request.tokens:
            raise RequestError("the prompt is empty: it needs at least one token")
        for token in (*request.tokens, *params.logit_bias, *params.stop_tokens):
            if not 0 <= token < vocab:
                raise RequestError(f"token {token} is outside the model's vocabulary of {vocab}")
        if len(request.tokens) >= limit:
            raise RequestError(
                f"the prompt's {len(request.tokens)} tokens leave no room in the context of {limit}: "
                "shorten it or raise the context"
            )
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= vocab:
            raise RequestError(
                f"top_logprobs {request.top_logprobs} is outside 0 to the vocabulary of {vocab}"
            )
        if request.depth is not None and not 0 <= request.depth <= self.config.depth:
            raise RequestError(f"depth {request.depth} is outside the engine's 0 to {self.config.depth}")
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, which this model does not have: use stop tokens"
            )

    def cancel(self, generation: Generation) -> None:
        """End a generation now; its slot is free. Nothing else changes."""
        if generation.status is not Status.FINISHED:
            generation.finish(FinishReason.CANCELLED)
            self._scheduler.release(generation, num_consumed=0)

    def preempt(self, generation: Generation) -> None:
        """Take a running generation's slot for others; it goes to the end of the queue and on from there.

        Its state goes to the prefix store if there is one, or else its tokens are evaluated again: the text
        is the same. Raises `RequestError` for a generation that does not run.
        """
        if generation.slot is None or generation.status is Status.FINISHED:
            raise RequestError(
                f"request {generation.number} is {generation.status}: only a running one can yield"
            )
        self._handover.keep(generation.slot, generation)
        self._scheduler.preempt(generation)

    def fork(self, generation: Generation, num_answers: int) -> list[Generation]:
        """Further answers from where a generation stands: the same request, tokens and state.

        Answer i of 1 … num_answers has the seed + i (mod 2⁶⁴), so that without output so far it is the answer
        to a request with that seed. Each takes a slot with a copy of the state, or waits for one and
        evaluates the tokens again. Raises `RequestError` for a finished generation.
        """
        if generation.status is Status.FINISHED:
            raise RequestError(f"request {generation.number} is finished: submit it again instead")
        answers = [self._generation(answer_request(generation.request, i)) for i in range(1, num_answers + 1)]
        for answer in answers:
            answer.take_over(generation.output, self.config.max_context)
        self._handover.share(generation, answers)
        return answers

    def save(self, what: Generation | str) -> bytes:
        """An unfinished generation, or the state kept for a session by its name, as bytes for `restore`.

        What is saved is the committed value, with nothing pending. Changes nothing. Raises `StateError` for a
        finished generation or a session without a state. `state.saved.write_file` puts bytes on a disk.
        """
        return self._handover.save(what).to_bytes()

    def restore(self, data: bytes) -> Generation | str:
        """Go on from what `save` returned → the generation, which runs; or the session, which has a slot.

        A generation's further tokens are those it would have had; its times count from here. A draft
        model's state is not saved and catches up. Raises `StateError` or `RequestError`, with nothing
        changed, for data that is damaged or of another version, model or type, for what does not fit this
        engine, and when no slot is free.
        """
        saved = self._handover.opened(data)
        about = saved.about.get("generation")
        generation = None if about is None else self._revived(about, saved.tokens)
        self._handover.settle(saved, generation)
        return generation if generation is not None else str(saved.about["session"])

    def _revived(self, about: Mapping[str, Any], tokens: list[int]) -> Generation:
        if len(tokens) >= self.config.max_context:
            raise StateError(
                f"a generation of {len(tokens)} tokens does not fit the context of "
                f"{self.config.max_context}: raise the context"
            )
        generation = self._generation(described_request(about, tokens, self.config.depth))
        generation.take_over(tokens[generation.num_prompt :], self.config.max_context)
        if generation.status is Status.FINISHED:
            raise StateError("the saved generation would be over here: use the tokenizer it was saved with")
        restore_counters(generation, about)
        return generation

    def close_session(self, session: str) -> None:
        """Give up the state that a slot keeps for a session."""
        self._scheduler.close_session(session)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def step(self) -> list[Event]:
        """Schedule, draft, forward, accept, commit, emit.

        An exception while drafting or in the forward pass loses nothing: the next step tries again.
        """
        plan = self._scheduler.schedule(self._handover.start)
        try:
            drafts = self._draft(plan)
            logits = self._runner.forward(_windows(plan, drafts)) if plan else []
        except BaseException:
            self._restart(plan)
            raise
        tokens = [self._accept(*part) for part in zip(plan, drafts, logits, strict=True)]
        events, num_consumed = self._append(plan, drafts, tokens, logits)
        self._commit([work.slot for work in plan], num_consumed)
        return self._emit(plan, events)

    def _restart(self, plan: Sequence[Work]) -> None:
        """After an interrupted pass: verify windows left no trace; prompts that moved a state begin again."""
        for work in plan:
            self._drafter.reset(work.slot)
            if work.prompt or self.config.depth == 0:
                self._runner.pool.reset(work.slot)
                work.generation.start(num_cached=0)

    def _draft(self, plan: Sequence[Work]) -> list[list[int]]:
        asked = [work for work in plan if work.generation.request.depth != 0 and self.config.depth]
        queries = [
            DraftQuery(
                work.slot, work.generation.tokens, work.generation.num_prompt, work.generation.request.params,
                work.max_draft,
            )
            for work in asked
        ]  # fmt: skip
        proposed = dict(zip((work.slot for work in asked), self._drafter.propose(queries), strict=True))
        return [proposed.get(work.slot, [])[: work.max_draft] for work in plan]

    def _accept(self, work: Work, draft: Sequence[int], logits: Array) -> list[int] | None:
        """The target's tokens for one window; None where the model's logits are no numbers."""
        if not work.gives_token:
            return []
        if not np.isfinite(logits).all():
            return None
        generation = work.generation
        return accept(
            draft,
            lambda i: choose(
                logits[i],
                generation.request.params,
                [*generation.tokens, *draft[:i]],
                generation.num_prompt,
                self._ops,
            ),
        )

    def _append(
        self,
        plan: Sequence[Work],
        drafts: Sequence[Sequence[int]],
        tokens: Sequence[list[int] | None],
        logits: Sequence[Array],
    ) -> tuple[list[Event], list[int]]:
        """Give tokens to their generations → news, and how many window tokens each has thereby consumed."""
        now = self._clock()
        events, num_consumed = [], []
        for work, draft, emitted, rows in zip(plan, drafts, tokens, logits, strict=True):
            generation, num_top = work.generation, work.generation.request.top_logprobs
            kept, shown = 0, ""
            if emitted is None:
                generation.finish(FinishReason.ERROR, "the model's logits are not finite numbers")
            for i, token in enumerate(emitted or []):
                if generation.status is Status.FINISHED:
                    break
                if num_top is not None:
                    generation.logprobs.append(token_logprob(rows[i], token, num_top))
                shown += generation.append(token, now, self.config.max_context)
                kept += 1
            if not work.prompt:
                generation.num_steps += 1
                generation.num_drafted += len(draft)
                generation.num_accepted += min(kept, len(draft), max(len(emitted or []) - 1, 0))
            events.append(Event(generation, (emitted or [])[:kept], shown, generation.finish_reason))
            num_consumed.append(len(work.prompt) or max(kept, 1))
        return events, num_consumed

    def _commit(self, slots: list[int], num_consumed: list[int]) -> None:
        for part in (self._runner, self._drafter):
            part.commit(slots, num_consumed)

    def _emit(self, plan: Sequence[Work], events: list[Event]) -> list[Event]:
        for work in plan:
            generation = work.generation
            generation.num_prefilled += len(work.prompt)
            position = int(self._runner.pool.position[work.slot])
            healthy = generation.finish_reason is not FinishReason.ERROR
            if healthy and (generation.finish_reason or self._is_boundary(work, position)):
                self._handover.keep(work.slot, generation)
            if generation.status is Status.FINISHED:
                self._scheduler.release(generation, position if healthy else 0)
            elif work.gives_token:
                generation.status = Status.DECODING
        return [event for event in events if event.tokens or event.text or event.finish_reason]

    def _is_boundary(self, work: Work, position: int) -> bool:
        return bool(work.prompt) and position % self.config.prefix_interval == 0

    def run(self) -> list[Event]:
        """Step until all requests are finished → all news."""
        events: list[Event] = []
        while self.has_work:
            events += self.step()
        return events

    def buffers(self) -> list[Buffer]:
        """Every buffer of the engine and its drafter; of the prefix store, what it holds now."""
        kept = Buffer("prefix store", "prefix store", (self.prefix_stats.num_bytes,), "uint8")
        own = [*self._runner.buffers(), *self._drafter.buffers()]
        return [*own, kept] if self.config.prefix_bytes else own

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix store did and holds; zeros where there is none."""
        prefixes = self._handover.prefixes
        return prefixes.stats if prefixes else PrefixStats(0, 0, 0, 0, 0)


def _windows(plan: Sequence[Work], drafts: Sequence[Sequence[int]]) -> list[Window]:
    """Prompt chunks are consumed in full; a window to verify is the last token and the draft."""
    return [
        Window(work.slot, work.prompt, num_logits=int(work.gives_token), advance=True)
        if work.prompt
        else Window(work.slot, [work.generation.tokens[-1], *draft], num_logits=1 + len(draft))
        for work, draft in zip(plan, drafts, strict=True)
    ]
