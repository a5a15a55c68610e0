"""Model -> what leaves the training machine, and an audit of it."""

from sima_attn.export.audit_model import assert_exp_free, audit
from sima_attn.export.audit_report import AuditReport, ExpCall

__all__ = ["AuditReport", "ExpCall", "assert_exp_free", "audit"]
