"""What a verification finds: `record_format.findings`, under the name the broker knows it by."""

from record_format.findings import Checked, Findings, Problem, ProblemKind, VerifyReport

__all__ = ["Checked", "Findings", "Problem", "ProblemKind", "VerifyReport"]
