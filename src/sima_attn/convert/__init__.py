"""any model -> the same model with another attention."""

from sima_attn.convert.convert import convert
from sima_attn.convert.report import ConversionReport, Converted, Skipped

__all__ = ["ConversionReport", "Converted", "Skipped", "convert"]
