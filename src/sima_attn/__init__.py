"""sima-attn: vision transformers without a single exp().

Names are imported when they are first used, so that `import sima_attn` and `sima --help` stay quick. Our
models join timm's registry when timm is imported, before or after this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sima_attn._timm_registration import register_with_timm
from sima_attn._version import __version__

if TYPE_CHECKING:
    from sima_attn.models import load_official, save_official
    from sima_attn.nn import (
        ATTENTIONS,
        SimAttention,
        SimClassAttention,
        SimCrossAttention,
        SimMultiheadAttention,
        attention_class,
        create_attention,
    )
    from sima_attn.ops import ExpCounter, SimaAccumulator, choose_order, sima_attention

_HOME = {
    **dict.fromkeys(("ExpCounter", "SimaAccumulator", "choose_order", "sima_attention"), "sima_attn.ops"),
    **dict.fromkeys(
        (
            "ATTENTIONS",
            "SimAttention",
            "SimClassAttention",
            "SimCrossAttention",
            "SimMultiheadAttention",
            "attention_class",
            "create_attention",
        ),
        "sima_attn.nn",
    ),
    **dict.fromkeys(("load_official", "save_official"), "sima_attn.models"),
}

__all__ = [
    "ATTENTIONS",
    "ExpCounter",
    "SimAttention",
    "SimClassAttention",
    "SimCrossAttention",
    "SimMultiheadAttention",
    "SimaAccumulator",
    "__version__",
    "attention_class",
    "choose_order",
    "create_attention",
    "load_official",
    "save_official",
    "sima_attention",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'sima_attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


register_with_timm()
