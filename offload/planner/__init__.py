"""What a run will take and how long a step will be, before it begins."""

from offload.planner.plan import PlanReport, plan
from offload.planner.predict import Prediction

__all__ = ["PlanReport", "Prediction", "plan"]
