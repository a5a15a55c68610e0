"""sima-attn: vision transformers without a single exp().

Names are imported on first use, so that `import sima_attn` and `sima --help` stay fast. The models are registered with
timm when timm is imported, before or after this package, and the Auto classes of transformers load
converted models.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sima_attn._registration import register_with_other_libraries
from sima_attn._version import __version__

if TYPE_CHECKING:
    from sima_attn.auditing import AuditReport, assert_exp_free, audit
    from sima_attn.conversion import ConversionReport, convert
    from sima_attn.distill.api import linearize
    from sima_attn.explain import heatmap
    from sima_attn.export.onnx import export_onnx
    from sima_attn.export.quantize import quantize_onnx
    from sima_attn.models import load_official, save_official
    from sima_attn.models.loading import load
    from sima_attn.models.saving import save
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
    from sima_attn.parallel import parallelize
    from sima_attn.train.finetune import finetune

__all__ = [
    "ATTENTIONS",
    "AuditReport",
    "ConversionReport",
    "ExpCounter",
    "SimAttention",
    "SimClassAttention",
    "SimCrossAttention",
    "SimMultiheadAttention",
    "SimaAccumulator",
    "__version__",
    "assert_exp_free",
    "attention_class",
    "audit",
    "choose_order",
    "convert",
    "create_attention",
    "export_onnx",
    "finetune",
    "heatmap",
    "linearize",
    "load",
    "load_official",
    "parallelize",
    "quantize_onnx",
    "save",
    "save_official",
    "sima_attention",
]

_HOMES = {
    "sima_attn.ops": ("ExpCounter", "SimaAccumulator", "choose_order", "sima_attention"),
    "sima_attn.models": ("load_official", "save_official"),
    "sima_attn.models.loading": ("load",),
    "sima_attn.models.saving": ("save",),
    "sima_attn.conversion": ("ConversionReport", "convert"),
    "sima_attn.distill.api": ("linearize",),
    "sima_attn.parallel": ("parallelize",),
    "sima_attn.train.finetune": ("finetune",),
    "sima_attn.explain": ("heatmap",),
    "sima_attn.export.onnx": ("export_onnx",),
    "sima_attn.export.quantize": ("quantize_onnx",),
    "sima_attn.auditing": ("AuditReport", "assert_exp_free", "audit"),
}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'sima_attn' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "sima_attn.nn")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__


register_with_other_libraries()
