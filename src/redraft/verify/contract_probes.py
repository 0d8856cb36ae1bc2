"""Probes of what surrounds the text: limits, stops, counts, log-probabilities, seeds, acceptance counters."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from redraft.verify import prompts
from redraft.verify.answer import Answer
from redraft.verify.client import RefusedError
from redraft.verify.divergence import Kind
from redraft.verify.probe import ProbeResult, Report, Target

SEED_TEMPERATURE = 1.0
# Samples of one seed that are all cut short by rounding still agree far longer than those of two seeds.
MIN_AGREEMENT = 1.5


async def streamed_against_whole(target: Target) -> ProbeResult:
    """The same request as a stream and as one body, on both endpoints: text, end and counts are equal."""
    report = Report()
    served = []
    for chat in (False, True):
        try:
            for prompt in prompts.greedy_prompts(2):
                query = target.query(prompt, chat=chat)
                whole = await target.client.ask(query)
                streamed = await target.client.ask(replace(query, stream=True))
                _compare_streamed(report, whole, streamed, query.path)
            served.append("chat" if chat else "completions")
        except RefusedError as error:
            report.note(f"{'chat' if chat else 'completions'} not served: {error}")
    if not served:
        raise RefusedError("neither endpoint streams")
    return report.result(f"{' and '.join(served)}, whole and streamed")


def _compare_streamed(report: Report, whole: Answer, streamed: Answer, path: str) -> None:
    report.compare(whole, streamed, f"{path}, streamed")
    if whole.text != streamed.text:
        return
    reasons = f"{streamed.finish_reason} instead of {whole.finish_reason}"
    report.expect(
        whole.finish_reason == streamed.finish_reason, Kind.TOKEN, f"{path}, streamed: ends with {reasons}"
    )
    if whole.usage and streamed.usage:
        counts = (
            f"{streamed.usage.completion} in {streamed.num_chunks} chunks instead of {whole.usage.completion}"
        )
        same = whole.usage.completion == streamed.usage.completion
        report.expect(same, Kind.TOKEN, f"{path}, streamed: counts {counts} tokens of the same text")


async def limits(target: Target) -> ProbeResult:
    """`max_tokens` of 1, 2, 3, 5 and 8, also inside a run of accepted drafts, is met exactly."""
    report = Report()
    for prompt in (prompts.copying(0), prompts.telling(0)):
        for limit in (1, 2, 3, 5, 8):
            answer = await target.client.ask(target.query(prompt, max_tokens=limit))
            label = f"max_tokens {limit}"
            for count in _token_counts(answer):
                report.expect(count <= limit, Kind.TOKEN, f"{label}: {count} tokens")
                short = answer.finish_reason == "length" and count < limit
                report.expect(not short, Kind.TOKEN, f"{label}: ends by length after {count} tokens")
    return report.result("limits of 1, 2, 3, 5 and 8 tokens on two prompts")


def _token_counts(answer: Answer) -> list[int]:
    """How many tokens an answer has, by its usage and by its log-probabilities."""
    counts = [answer.usage.completion] if answer.usage else []
    return counts + ([len(answer.steps)] if answer.steps else [])


async def stops(target: Target) -> ProbeResult:
    """A stop string that stands in the greedy text ends it there, whole and streamed."""
    report = Report()
    for prompt in prompts.greedy_prompts(target.load.num_prompts):
        free = await target.client.ask(target.query(prompt))
        words = free.text.split(" ")
        stop = " " + words[len(words) // 2] if len(words) > 3 and words[len(words) // 2] else ""
        if not stop:
            continue
        expected = free.text[: free.text.index(stop)]
        for stream in (False, True):
            answer = await target.client.ask(target.query(prompt, stop=(stop,), stream=stream))
            label = f"stop {stop!r}{', streamed' if stream else ''}"
            report.expect(stop not in answer.text, Kind.TOKEN, f"{label}: the text goes on behind it")
            if answer.text == expected:
                reason = f"{label}: ends with {answer.finish_reason} instead of stop"
                report.expect(answer.finish_reason == "stop", Kind.TOKEN, reason)
            elif expected.startswith(answer.text):
                report.find(
                    Kind.TOKEN, f"{label}: the text ends {len(expected) - len(answer.text)} characters early"
                )
            elif stop not in answer.text:
                report.note(f"{label}: another text, so its end cannot be compared")
    if not report.num_comparisons:
        raise RefusedError("the greedy texts are too short to put a stop into")
    return report.result(f"stop strings inside {target.load.num_prompts} greedy texts")


async def usage(target: Target) -> ProbeResult:
    """Counts of the same request agree with each other, add up, and match the tokens listed."""
    report = Report()
    for prompt in prompts.greedy_prompts(2):
        answers = [await target.client.ask(target.query(prompt)) for _ in range(2)]
        answers.append(await target.client.ask(target.query(prompt, stream=True)))
        given = [a.usage for a in answers if a.usage is not None]
        if not given:
            raise RefusedError("the server reports no usage")
        counts = sorted({u.prompt for u in given})
        report.expect(len(counts) == 1, Kind.TOKEN, f"one prompt is counted as {counts} tokens")
        for answer in answers:
            _check_usage(report, answer)
    return report.result("counts of prompts, answers and totals; tokens listed against tokens counted")


def _check_usage(report: Report, answer: Answer) -> None:
    use = answer.usage
    if use is None:
        return
    total = f"{use.prompt} + {use.completion} tokens make a total of {use.total}"
    report.expect(use.total == use.prompt + use.completion, Kind.TOKEN, total)
    if answer.steps:
        ends = 1 if answer.finish_reason == "stop" else 0  # an end token is counted by some and listed by few
        chunks = f" ({answer.num_chunks} chunks)" if answer.num_chunks else ""
        text = f"usage counts {use.completion} tokens{chunks}, {len(answer.steps)} are listed"
        report.expect(0 <= use.completion - len(answer.steps) <= ends, Kind.TOKEN, text)


async def logprobs(target: Target) -> ProbeResult:
    """Log-probabilities are those of a distribution, and of the tokens that were chosen."""
    if not target.top_logprobs:
        raise RefusedError("the server offers no log-probabilities")
    report = Report()
    for n in range(target.load.num_prompts):
        answer = await target.client.ask(target.query(prompts.telling(n)))
        void = f"{len(answer.steps) - 1} tokens after the first have log-probability 0"
        report.expect(not answer.logprobs_are_void, Kind.DISTRIBUTION, void)
        for at, step in enumerate(answer.steps):
            above = f"token {at} has log-probability {step.logprob:.3f}, above 0"
            report.expect(step.logprob <= 1e-4, Kind.DISTRIBUTION, above)  # servers round to float32 and text
            mass = sum(math.exp(value) for value in step.top.values())
            report.expect(mass <= 1.01, Kind.DISTRIBUTION, f"token {at}: the likeliest add up to {mass:.3f}")
            if step.top and not answer.logprobs_are_void:
                low = f"token {at} is {max(step.top.values()) - step.logprob:.2f} nats below the likeliest"
                greedy = step.logprob >= max(step.top.values()) - 1e-3  # servers print few digits
                report.expect(greedy, Kind.DISTRIBUTION, f"{low}, at temperature 0")
    return report.result(f"{target.load.num_prompts} greedy answers with their likeliest tokens")


async def seeds(target: Target) -> ProbeResult:
    """At a temperature, one seed gives one text, also among neighbours; other seeds give others."""
    report = Report()
    same, loaded, other = [], [], []
    num_prompts = max(4, target.load.num_prompts)
    for n in range(num_prompts):
        query = target.query(prompts.telling(n), temperature=SEED_TEMPERATURE, seed=41, top_logprobs=0)
        first = (await target.client.ask(query)).text
        same.append(_agreement(first, (await target.client.ask(query)).text))
        other.append(_agreement(first, (await target.client.ask(replace(query, seed=42))).text))
        neighbours = [replace(query, seed=100 + i) for i in range(target.concurrency - 1)]
        together = await asyncio.gather(*(target.client.ask(q) for q in (query, *neighbours)))
        loaded.append(_agreement(first, together[0].text))
    if fmean(other) == 1.0:
        raise RefusedError("two seeds give the same texts: the server samples nothing here")
    for label, shares in (("one after another", same), ("among neighbours", loaded)):
        _judge_seed(report, label, shares, other)
    return report.result(
        f"{num_prompts} samples; of one seed {fmean(same):.0%} agree, among neighbours {fmean(loaded):.0%}, "
        f"of two seeds {fmean(other):.0%}"
    )


def _judge_seed(report: Report, label: str, same: Sequence[float], other: Sequence[float]) -> None:
    report.num_comparisons += len(same)
    num_equal = sum(share == 1.0 for share in same)
    if num_equal == 0 and fmean(same) < MIN_AGREEMENT * fmean(other) + 0.05:
        report.find(Kind.DISTRIBUTION, f"the seed is not honoured {label}: no sample of {len(same)} repeats")
    elif num_equal < len(same):
        report.ties += len(same) - num_equal
        report.note(f"{label}, {len(same) - num_equal} samples of one seed part late: rounding may do that")


def _agreement(a: str, b: str) -> float:
    """Share of two texts that is equal from the start."""
    if a == b:
        return 1.0
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return first / max(len(a), len(b))


async def acceptance_counters(target: Target) -> ProbeResult:
    """Never more tokens accepted than drafted: by request, in total, and at every place of a draft."""
    report = Report()
    drafted = accepted = 0
    for answer in target.client.answers:
        if answer.drafted is not None and answer.accepted is not None:
            drafted, accepted = drafted + answer.drafted, accepted + answer.accepted
            text = f"a request accepted {answer.accepted} of {answer.drafted} drafted tokens"
            report.expect(0 <= answer.accepted <= answer.drafted, Kind.TOKEN, text)
    now = await target.client.counters()
    if now is not None and target.before is not None:
        added = now.since(target.before)
        drafted, accepted = max(drafted, added.drafted), max(accepted, added.accepted)
        text = f"/metrics: {added.accepted} of {added.drafted} drafted tokens accepted"
        report.expect(0 <= added.accepted <= added.drafted, Kind.TOKEN, text)
        places = added.per_position
        falling = all(a >= b for a, b in itertools.pairwise(places))
        report.expect(
            falling, Kind.TOKEN, f"/metrics: a later place of a draft is accepted more often: {places}"
        )
        if places:
            text = f"/metrics: places of a draft add up to {sum(places)} accepted, not {added.accepted}"
            report.expect(sum(places) == added.accepted, Kind.TOKEN, text)
        if now.rate is not None:
            report.expect(0 <= now.rate <= 1, Kind.TOKEN, f"/metrics: an acceptance rate of {now.rate}")
    if not report.num_comparisons:
        raise RefusedError("no counters in the answers or at /metrics: is speculation on?")
    if not drafted:
        report.note("nothing was drafted: speculation was not exercised")
    return report.result(f"{drafted} tokens drafted, {accepted} accepted")
