"""What a server has done since its start, as numbers and as a Prometheus page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from redraft.engine import FinishReason, Generation, Status
from redraft.engine.prefix import PrefixStats

_HELP = {
    "requests_total": "Requests that ended, by how they ended.",
    "prompt_tokens_total": "Prompt tokens of requests.",
    "cached_tokens_total": "Prompt tokens whose state was at hand.",
    "generation_tokens_total": "Tokens written.",
    "steps_total": "Windows verified.",
    "spec_decode_num_draft_tokens_total": "Tokens drafted.",
    "spec_decode_num_accepted_tokens_total": "Drafted tokens accepted.",
    "num_requests_running": "Requests that have a slot.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "prefix_store_bytes": "Bytes that the prefix store holds.",
}


@dataclass
class Totals:
    """Counts of ended requests; in a snapshot, of those at hand too."""

    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    num_prompt: int = 0
    num_cached: int = 0
    num_written: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prefix_bytes: int = 0

    def count(self, generation: Generation, reason: FinishReason | None = None) -> None:
        """Add an ended request; `reason`: instead of its own."""
        ended = reason or generation.finish_reason
        assert ended is not None, "counted when it has ended"
        self.ended[ended] += 1
        self._add(generation)

    def with_running(self, generations: Sequence[Generation], prefixes: PrefixStats) -> Totals:
        """A copy, with requests at hand and the prefix store."""
        waiting = sum(generation.status is Status.WAITING for generation in generations)
        snapshot = replace(
            self,
            ended=dict(self.ended),
            num_waiting=waiting,
            num_running=len(generations) - waiting,
            prefix_bytes=prefixes.num_bytes,
        )
        for generation in generations:
            snapshot._add(generation)
        return snapshot

    def _add(self, generation: Generation) -> None:
        self.num_prompt += generation.num_prompt
        self.num_cached += generation.num_cached
        self.num_written += len(generation.output)
        self.num_steps += generation.num_steps
        self.num_drafted += generation.num_drafted
        self.num_accepted += generation.num_accepted

    def page(self) -> str:
        """For Prometheus."""
        values = {
            "prompt_tokens_total": self.num_prompt,
            "cached_tokens_total": self.num_cached,
            "generation_tokens_total": self.num_written,
            "steps_total": self.num_steps,
            "spec_decode_num_draft_tokens_total": self.num_drafted,
            "spec_decode_num_accepted_tokens_total": self.num_accepted,
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "prefix_store_bytes": self.prefix_bytes,
        }
        lines = _head("requests_total")
        lines += [f'redraft:requests_total{{finish_reason="{r}"}} {n}' for r, n in self.ended.items()]
        for name, value in values.items():
            lines += [*_head(name), f"redraft:{name} {value}"]
        return "\n".join(lines) + "\n"


def _head(name: str) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    return [f"# HELP redraft:{name} {_HELP[name]}", f"# TYPE redraft:{name} {kind}"]
