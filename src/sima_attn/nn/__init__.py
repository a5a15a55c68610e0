"""tokens -> tokens: attention modules. Needs torch only."""

from sima_attn.nn.attention import Attention, SimAttention
from sima_attn.nn.class_attention import SimClassAttention
from sima_attn.nn.cross_attention import SimCrossAttention
from sima_attn.nn.grid import follow_image_grid
from sima_attn.nn.multihead import SimMultiheadAttention
from sima_attn.nn.registry import ATTENTIONS, attention_class, create_attention
from sima_attn.nn.relu2 import Relu2Attention
from sima_attn.nn.relu2_rope import Relu2RopeAttention
from sima_attn.nn.relu2_wide import Relu2WideAttention
from sima_attn.nn.sima_local import SimLocalAttention
from sima_attn.nn.sima_rope import SimRopeAttention

__all__ = [
    "ATTENTIONS",
    "Attention",
    "Relu2Attention",
    "Relu2RopeAttention",
    "Relu2WideAttention",
    "SimAttention",
    "SimClassAttention",
    "SimCrossAttention",
    "SimLocalAttention",
    "SimMultiheadAttention",
    "SimRopeAttention",
    "attention_class",
    "create_attention",
    "follow_image_grid",
]
