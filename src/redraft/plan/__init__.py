"""The planner: what a model costs on an engine before anything is loaded, term by term.

It knows models as numbers, this engine's buffers, and the formulas of llama.cpp, vLLM and SGLang; it knows no
engine that runs.
"""

from redraft.plan.engines import compare_depths, compare_engines, plan
from redraft.plan.settings import ENGINES, PlanSettings
from redraft.plan.solve import Frontier, Trade, frontier, trade
from redraft.plan.sources import catalogue_names, open_spec
from redraft.plan.spec import PlanLayer, PlanSpec, WeightGroup
from redraft.plan.term import Plan, Term

__all__ = [
    "ENGINES",
    "Frontier",
    "Plan",
    "PlanLayer",
    "PlanSettings",
    "PlanSpec",
    "Term",
    "Trade",
    "WeightGroup",
    "catalogue_names",
    "compare_depths",
    "compare_engines",
    "frontier",
    "open_spec",
    "plan",
    "trade",
]
