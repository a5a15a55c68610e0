"""any model -> the same model with another attention."""

from sima_attn.conversion.api import convert
from sima_attn.conversion.report import ConversionReport, Converted, Skipped

__all__ = ["ConversionReport", "Converted", "Skipped", "convert"]
