"""Audits a program: lists which GEMMs run in FP8 on a GPU, present or not, and why the others do not."""

from fp8flax._audit.auditing import assert_fp8, audit
from fp8flax._audit.compiling import compile_only_devices
from fp8flax._audit.gemms import AuditedGemm
from fp8flax._audit.report import AuditReport

__all__ = ["AuditReport", "AuditedGemm", "assert_fp8", "audit", "compile_only_devices"]
