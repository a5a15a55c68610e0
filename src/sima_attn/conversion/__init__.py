"""any model -> the same model with another attention."""

from typing import TYPE_CHECKING

from sima_attn.conversion.api import convert
from sima_attn.conversion.report import ConversionReport, Converted, Skipped

if TYPE_CHECKING:
    from sima_attn.conversion.saved import load_pretrained

__all__ = ["ConversionReport", "Converted", "Skipped", "convert", "load_pretrained"]


def __getattr__(name: str):
    if name != "load_pretrained":
        raise AttributeError(f"module 'sima_attn.conversion' has no attribute {name!r}")
    from sima_attn.conversion.saved import load_pretrained  # imports transformers

    return load_pretrained
