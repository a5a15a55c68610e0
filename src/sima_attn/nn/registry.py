"""The registry of attentions. Tests, benchmarks, the command line and the docs enumerate it.

To add an attention: one file with one subclass of `Attention`, and one line here.
"""

import functools

from sima_attn._errors import unknown_name
from sima_attn.nn.attention import Attention, SimAttention
from sima_attn.nn.baselines.cosformer import Cosformer2dAttention, CosformerAttention
from sima_attn.nn.baselines.efficient import EfficientAttention
from sima_attn.nn.baselines.elu import EluAttention
from sima_attn.nn.baselines.linformer import LinformerAttention
from sima_attn.nn.baselines.nystrom import NystromAttention
from sima_attn.nn.baselines.performer import PerformerAttention
from sima_attn.nn.baselines.soft import SoftAttention, SoftFullAttention
from sima_attn.nn.baselines.softmax import ExplicitSoftmaxAttention, SoftmaxAttention
from sima_attn.nn.baselines.softmax_local import SoftmaxLocalAttention
from sima_attn.nn.baselines.softmax_rope import SoftmaxRopeAttention
from sima_attn.nn.baselines.xca import XCAttention
from sima_attn.nn.relu2 import Relu2Attention
from sima_attn.nn.relu2_rope import Relu2RopeAttention
from sima_attn.nn.relu2_wide import Relu2WideAttention
from sima_attn.nn.sima_local import SimLocalAttention
from sima_attn.nn.sima_rope import SimRopeAttention

ATTENTIONS: dict[str, type[Attention]] = {
    "sima": SimAttention,
    "sima_local": SimLocalAttention,
    "sima_rope": SimRopeAttention,
    "relu2": Relu2Attention,
    "relu2_wide": Relu2WideAttention,
    "relu2_rope": Relu2RopeAttention,
    "softmax": SoftmaxAttention,
    "softmax_local": SoftmaxLocalAttention,
    "softmax_rope": SoftmaxRopeAttention,
    "softmax_explicit": ExplicitSoftmaxAttention,
    "xca": XCAttention,
    "elu": EluAttention,
    "efficient": EfficientAttention,
    "cosformer": CosformerAttention,
    "cosformer_2d": Cosformer2dAttention,
    "soft": SoftAttention,
    "soft_full": SoftFullAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "nystrom": NystromAttention,
}


def attention_class(name: str, **options) -> type[Attention]:
    """The class of an attention, with its options fixed, for timm's `attn_layer`.

    Example:
        ```python
        timm.create_model("deit_small_patch16_224", attn_layer=attention_class("sima", token_ref=197))
        ```
    """
    if isinstance(name, type):
        raise ValueError(
            f"an attention is given by its name in sima_attn.ATTENTIONS, got the class {name.__name__}; add a class "
            "of your own there first"
        )
    if name not in ATTENTIONS:
        raise unknown_name("attention", name, ATTENTIONS)
    base = ATTENTIONS[name]
    if not options:
        return base

    @functools.wraps(base.__init__)
    def init(self: Attention, *args, **kwargs) -> None:
        base.__init__(self, *args, **{**options, **kwargs})
        self.__class__ = base  # which pickle and exported files can name

    return type(base.__name__, (base,), {"__init__": init, "__doc__": base.__doc__})


def create_attention(name: str, dim: int, num_heads: int = 8, *, num_tokens: int | None = None, **options) -> Attention:
    """An attention module by name. `num_tokens` is for attentions with a fixed number of tokens."""
    cls = attention_class(name)
    if cls.needs_num_tokens:
        options["num_tokens"] = num_tokens
    return cls(dim, num_heads, **options)
