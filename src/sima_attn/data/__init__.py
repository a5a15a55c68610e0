"""Images and labels: where they lie (sources), how they become batches (loader, cache), how they vary (augment)."""

from sima_attn.data.sources import Source, open_data

__all__ = ["Source", "open_data"]
