"""any model -> the same model with another attention."""

from sima_attn.conversion.api import convert
from sima_attn.conversion.huggingface import load_pretrained
from sima_attn.conversion.report import ConversionReport, Converted, Skipped

__all__ = ["ConversionReport", "Converted", "Skipped", "convert", "load_pretrained"]
