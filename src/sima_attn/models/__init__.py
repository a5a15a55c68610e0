"""image -> logits or feature maps: the model families, registered with timm when this is imported."""

from sima_attn.models import cvt, deit, miniature, xcit
from sima_attn.models.weights import LoadReport, load_official, save_official

__all__ = ["LoadReport", "cvt", "deit", "load_official", "miniature", "save_official", "xcit"]
