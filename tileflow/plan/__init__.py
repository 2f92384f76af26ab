"""The plan: where every row goes, computed alike on every rank from ``counts`` and a `PlanConfig`.

``layout`` gives every run its place, ``tiles`` cuts what a rank computes into bands, ``schedule``
orders the bands, ``segments`` cuts what it sends home. All records are flat int32 arrays that a
kernel can read (and could write).
"""

from .config import PlanConfig
from .plan import Plan, build_plan

__all__ = ["Plan", "PlanConfig", "build_plan"]
