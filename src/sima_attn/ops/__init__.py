"""q, k, v -> o: parameter-free attention. Needs torch only."""

from sima_attn.ops.api import Plan, plan, sima_attention, sima_attention_qkv
from sima_attn.ops.cost import AttentionShape, Cost, choose_order, sima_cost
from sima_attn.ops.exp_counter import ExpCounter
from sima_attn.ops.linear_attention import relu2_attention
from sima_attn.ops.reference import sima_matrix_reference, sima_reference
from sima_attn.ops.streaming import SimaAccumulator

__all__ = [
    "AttentionShape",
    "Cost",
    "ExpCounter",
    "Plan",
    "SimaAccumulator",
    "choose_order",
    "plan",
    "relu2_attention",
    "sima_attention",
    "sima_attention_qkv",
    "sima_cost",
    "sima_matrix_reference",
    "sima_reference",
]
