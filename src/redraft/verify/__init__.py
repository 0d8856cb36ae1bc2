"""Is the state after a rejected draft the state before it? For a model in this engine, bit by bit; for any
server, through its API.

What the state transitions must satisfy is checked against fresh sequences of the surviving tokens; every
comparison is equality of bytes.
"""

from redraft.verify.checks import CHECKS, run_check, run_checks
from redraft.verify.difference import CheckResult, Difference
from redraft.verify.divergence import Kind
from redraft.verify.effort import Effort, full, quick
from redraft.verify.probe import Finding, ProbeResult
from redraft.verify.probing import PROBES, ServerSettings, probe_server
from redraft.verify.trial import Subject

__all__ = [
    "CHECKS",
    "PROBES",
    "CheckResult",
    "Difference",
    "Effort",
    "Finding",
    "Kind",
    "ProbeResult",
    "ServerSettings",
    "Subject",
    "full",
    "probe_server",
    "quick",
    "run_check",
    "run_checks",
]
