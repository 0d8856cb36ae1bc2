"""The decision: is speculation worth its memory, for this queue of agent tasks, at this concurrency?"""

from redraft.decide.arms import Arm, ArmPlan, plan_arms
from redraft.decide.measure import RunResult, measure
from redraft.decide.summary import Summary, summarise
from redraft.decide.tasks import Task, Turn, builtin_tasks, read_tasks
from redraft.decide.verdict import Verdict, judge

__all__ = [
    "Arm",
    "ArmPlan",
    "RunResult",
    "Summary",
    "Task",
    "Turn",
    "Verdict",
    "builtin_tasks",
    "judge",
    "measure",
    "plan_arms",
    "read_tasks",
    "summarise",
]
