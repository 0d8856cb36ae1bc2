"""Probes of the text: the same greedy request must give the same text, whatever happens around it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import fmean

from redraft.verify import prompts
from redraft.verify.answer import Answer, Query
from redraft.verify.client import Client, RefusedError
from redraft.verify.divergence import Kind
from redraft.verify.probe import ProbeResult, Report, Target

# Nats. Rounding in 16-bit arithmetic moves a log-probability by hundredths on average; a stale state by
# tenths to whole nats.
MEAN_LOGPROB_SHIFT = 0.1


async def speculation_against_none(target: Target) -> ProbeResult:
    """With speculation against without: another server, or the same one told not to draft."""
    if target.plain is None:
        raise RefusedError("no server without speculation: name one with --baseline, or say how with --off")
    report = Report()
    for prompt in prompts.greedy_prompts(target.load.num_prompts):
        await _compare_through_ties(target.plain, target.client, report, target.query(prompt))
    return report.result(f"{target.load.num_prompts} greedy texts against those without speculation")


async def _compare_through_ties(plain: Client, client: Client, report: Report, query: Query) -> None:
    """Compare two servers' answers; after a near-tie go on behind it, with what `plain` took there."""
    label = f"'{query.prompt[:24]}…'"
    while query.max_tokens > 0:
        expected = await plain.ask(query)
        difference = report.compare(expected, await client.ask(query), label)
        if query.chat or difference is None or difference.kind is not Kind.TIE:
            return
        taken = difference.position + 1
        given = "".join(step.token for step in expected.steps[:taken])
        query = replace(query, prompt=query.prompt + given, max_tokens=query.max_tokens - taken)


async def repeated(target: Target) -> ProbeResult:
    """The same request three times, one after another."""
    report = Report()
    for prompt in prompts.greedy_prompts(target.load.num_prompts):
        first, *others = [await target.client.ask(target.query(prompt)) for _ in range(3)]
        for other in others:
            report.compare(first, other, f"'{prompt[:24]}…' repeated")
    return report.result(f"{target.load.num_prompts} greedy requests, three times each")


async def among_neighbours(target: Target) -> ProbeResult:
    """Requests alone, then all at once; each has a code word of its own that must not turn up elsewhere."""
    report = Report()
    queries = [target.query(prompts.with_code_word(n)) for n in range(target.concurrency)]
    alone = [await target.client.ask(query) for query in queries]
    for _ in range(2):
        together = await asyncio.gather(*(target.client.ask(query) for query in queries))
        for n, (expected, found) in enumerate(zip(alone, together, strict=True)):
            foreign = _foreign_words(found, expected, n, target.concurrency)
            label = f"request {n} among {target.concurrency - 1} others"
            if foreign:
                report.num_comparisons += 1
                report.find(Kind.STATE, f"{label}: speaks of '{foreign}', the word of another request")
            else:
                report.compare(expected, found, label)
    return report.result(f"{target.concurrency} requests alone and together, twice")


def _foreign_words(found: Answer, expected: Answer, n: int, count: int) -> str:
    others = [prompts.code_word(i) for i in range(count) if i != n]
    return ", ".join(word for word in others if word in found.text and word not in expected.text)


async def cold_against_warm(target: Target) -> ProbeResult:
    """A prompt never seen, then again, after a part of it, and with half of its own answer.

    A kept state must belong to exactly the tokens it is used for.
    """
    if target.chat:
        raise RefusedError("the server has no plain completions, so a prompt's tokens cannot be continued")
    report = Report()
    lengths, hits, num_warm = [], 0, 0
    rate = await _tokens_per_word(target)
    for wanted in target.load.lengths:
        prompt = prompts.passage(max(2, round(wanted / rate)), seed=target.seed * 10_000 + wanted)
        part = prompt[: prompt.rindex(" ", 0, 2 * len(prompt) // 3)]
        cold = await target.client.ask(target.query(prompt))
        again = await target.client.ask(target.query(prompt))
        await target.client.ask(target.query(part, max_tokens=8))
        after_part = await target.client.ask(target.query(prompt))
        lengths.append(cold.usage.prompt if cold.usage else wanted)
        report.compare(cold, again, f"{lengths[-1]} tokens, sent again")
        report.compare(cold, after_part, f"{lengths[-1]} tokens, after a part of it")
        await _continue(target, report, prompt, cold)
        hits += sum(bool(a.usage and a.usage.cached) for a in (again, after_part))
        num_warm += 2
    reuse = f"the server reports cached tokens in {hits} of {num_warm} repetitions"
    return report.result(f"prompts of {', '.join(map(str, lengths))} tokens, cold and warm; {reuse}")


async def _tokens_per_word(target: Target) -> float:
    answer = await target.client.ask(
        target.query(prompts.passage(50, seed=target.seed * 10_000), max_tokens=1)
    )
    return answer.usage.prompt / 50 if answer.usage else 1.3


async def _continue(target: Target, report: Report, prompt: str, cold: Answer) -> None:
    """Ask for the rest of an answer, given its first half: as a conversation's next turn begins."""
    half = len(cold.steps) // 2
    if not half or cold.usage is None:
        return
    given = "".join(step.token for step in cold.steps[:half])
    rest = await target.client.ask(target.query(prompt + given, max_tokens=len(cold.steps) - half))
    if rest.usage is None or rest.usage.prompt != cold.usage.prompt + half:
        return  # the text is cut into other tokens than it was made of: no equality is promised
    expected = Answer(cold.text[len(given) :], cold.finish_reason, None, cold.steps[half:])
    report.compare(expected, rest, f"{cold.usage.prompt} tokens, continued after {half} of its own")


async def rescored(target: Target) -> ProbeResult:
    """Tokens as they were generated against the same places computed afresh as the end of a prompt."""
    if target.chat or not target.top_logprobs:
        raise RefusedError("the server offers no log-probabilities on plain completions")
    report = Report()
    shifts: list[float] = []
    num_prompts = min(2, target.load.num_prompts)
    for n in range(num_prompts):
        prompt = prompts.copying(n) if n % 2 == 0 else prompts.telling(n)
        answer = await target.client.ask(target.query(prompt))
        spread = max(1, len(answer.steps) * num_prompts // target.load.num_rescored)
        for at in range(1, len(answer.steps), spread):
            shifts += await _rescore(target, report, prompt, answer, at)
    mean = fmean(shifts) if shifts else 0.0
    text = f"log-probabilities shift by {mean:.2f} nats on average between generating and rescoring"
    report.expect(mean <= MEAN_LOGPROB_SHIFT, Kind.DISTRIBUTION, text)
    if not shifts:
        report.note("no position could be rescored: texts are cut into other tokens than they were made of")
    return report.result(f"{len(shifts)} positions rescored, mean shift {mean:.3f} nats")


async def _rescore(target: Target, report: Report, prompt: str, answer: Answer, at: int) -> list[float]:
    given = "".join(step.token for step in answer.steps[:at])
    fresh = await target.client.ask(target.query(prompt + given, max_tokens=1))
    if fresh.usage is None or answer.usage is None or fresh.usage.prompt != answer.usage.prompt + at:
        return []
    if not fresh.steps:
        return []
    own = answer.steps[at]
    expected = Answer(own.token, None, None, (own,))
    found = Answer(fresh.steps[0].token, None, None, fresh.steps[:1])
    report.compare(found, expected, f"token {at} of '{prompt[:24]}…' rescored")
    trusted = own.token == fresh.steps[0].token and not answer.logprobs_are_void
    return [abs(own.logprob - fresh.steps[0].logprob)] if trusted else []
