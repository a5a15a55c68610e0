"""Model or ONNX file -> counts of parameters, MACs and exp-like calls.

model  a torch model, by running it        onnx  a file, by reading its graph        report  what both return
"""

from sima_attn.auditing.model import assert_exp_free, audit
from sima_attn.auditing.report import AuditReport, ExpCall

__all__ = ["AuditReport", "ExpCall", "assert_exp_free", "audit"]
