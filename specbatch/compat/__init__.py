"""Can this draft speculate for this target? Read from the files of both, without loading weights."""

from specbatch.compat.checkpoint import cached, locate
from specbatch.compat.checks import check, require_drafting
from specbatch.compat.memory import Demand, demand
from specbatch.compat.report import Finding, Memory, Report, Severity

__all__ = ["Demand", "Finding", "Memory", "Report", "Severity", "cached", "check", "demand", "locate", "require_drafting"]
