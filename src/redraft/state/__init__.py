"""The memory of sequences: slots, attention rows, recurrent states, and the policies that roll them back."""

from redraft.state.batch import Batch, Window
from redraft.state.buffers import DRAFT_CATEGORY, Buffer, bytes_by_category, format_bytes
from redraft.state.rollback import RollbackPolicy, policy_named
from redraft.state.slots import Committed, SlotStatus, StatePool, state_buffers

__all__ = [
    "DRAFT_CATEGORY",
    "Batch",
    "Buffer",
    "Committed",
    "RollbackPolicy",
    "SlotStatus",
    "StatePool",
    "Window",
    "bytes_by_category",
    "format_bytes",
    "policy_named",
    "state_buffers",
]
