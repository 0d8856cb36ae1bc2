"""What a probe has to work with, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.verify.answer import Answer, Query
from redraft.verify.client import Client
from redraft.verify.counters import Counters
from redraft.verify.divergence import Divergence, Kind, diverge

TOP_LOGPROBS = 5  # the most that the OpenAI API grants on both endpoints


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its class, and the evidence."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class ProbeResult:
    """One probe. `skipped` says why it could not be made; `ties` and `unknown` are differences that accuse
    nobody.
    """

    name: str
    evidence: str
    findings: tuple[Finding, ...] = ()
    num_comparisons: int = 0
    ties: int = 0
    unknown: int = 0
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Load:
    """How much is asked: prompts a probe, tokens an answer, prompt lengths in tokens, positions rescored."""

    num_prompts: int
    num_tokens: int
    lengths: tuple[int, ...]
    num_rescored: int


QUICK = Load(3, 24, (63, 64, 65, 128), 6)
FULL = Load(8, 64, (63, 64, 65, 127, 128, 129, 192, 256, 257, 1024), 24)


@dataclass(frozen=True)
class Target:
    """A server under test. `plain` is the same model without speculation, where there is one.

    `chat`: it has no plain completions. `top_logprobs`: 0 where it offers none. `before`: its counters at the
    start. `seed` makes the prompts that it must not have seen before.
    """

    client: Client
    plain: Client | None
    load: Load
    concurrency: int
    chat: bool
    top_logprobs: int
    before: Counters | None
    seed: int

    def query(self, prompt: str, **settings: object) -> Query:
        """A greedy request with log-probabilities, changed by `settings`."""
        given = {"max_tokens": self.load.num_tokens, "top_logprobs": self.top_logprobs, "chat": self.chat}
        return Query(prompt, **(given | settings))  # type: ignore[arg-type]


class Report:
    """Collects what a probe sees."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.num_comparisons = self.ties = self.unknown = 0
        self._notes: list[str] = []

    def compare(self, expected: Answer, found: Answer, label: str) -> Divergence | None:
        """Two greedy answers to one prompt → their first difference."""
        self.num_comparisons += 1
        difference = diverge(expected, found)
        if difference is None:
            return None
        self.ties += difference.kind is Kind.TIE
        self.unknown += difference.kind is Kind.UNKNOWN
        if difference.kind in (Kind.TIE, Kind.UNKNOWN):
            self._notes.append(f"{label}: {difference.text}")
        else:
            self.find(difference.kind, f"{label}: {difference.text}")
        return difference

    def expect(self, holds: bool, kind: Kind, text: str) -> None:
        """One condition; `text` says what is wrong if it does not hold."""
        self.num_comparisons += 1
        if not holds:
            self.find(kind, text)

    def find(self, kind: Kind, text: str) -> None:
        """Something is wrong."""
        self.findings.append(Finding(kind, text))

    def note(self, text: str) -> None:
        """Something to know that accuses nobody."""
        self._notes.append(text)

    def result(self, evidence: str) -> ProbeResult:
        """The probe's result, named later."""
        text = "; ".join([evidence, *self._notes[:2]])
        return ProbeResult("", text, tuple(self.findings), self.num_comparisons, self.ties, self.unknown)
