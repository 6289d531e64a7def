"""Can this draft speculate for this target? Read from the files of both, without loading weights."""

from specbatch.compat.checkpoint import cached
from specbatch.compat.checks import check, require_drafting
from specbatch.compat.report import Finding, Memory, Report, Severity

__all__ = ["Finding", "Memory", "Report", "Severity", "cached", "check", "require_drafting"]
