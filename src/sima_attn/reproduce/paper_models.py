"""Table 1 of the paper: what it prints, beside the names of our models."""

from typing import NamedTuple


class PaperRow(NamedTuple):
    """A line of Table 1 (ImageNet-1k, 224 px): millions of parameters, billions of MACs ("FLOPs"), exp(), top-1."""

    model: str
    ours: str
    params: str
    flops: str
    exps: str
    top1: float


TABLE_1 = (
    PaperRow("XCiT-T24/16 -> SimA", "sima_xcit_tiny_24_p16_224", "12M", "2.3B", "0", 79.8),
    PaperRow("XCiT-T12/8 -> SimA", "sima_xcit_tiny_12_p8_224", "7M", "4.8B", "0", 79.4),
    PaperRow("XCiT-S12/16 -> SimA", "sima_xcit_small_12_p16_224", "26M", "4.8B", "0", 82.1),
    PaperRow("DeiT-S -> SimA", "sima_deit_small_patch16_224", "22M", "4.6B", "0", 79.8),
    PaperRow("CvT-13 -> SimA", "sima_cvt_13", "20M", "4.5B", "0", 81.4),
    PaperRow("DeiT-S -> SimA, 1 head", "sima_deit_small_patch16_224_1head", "22M", "4.6B", "0", 79.4),
    PaperRow("DeiT-S -> SimA, ReLU", "sima_deit_small_patch16_224_relu", "22M", "4.6B", "0", 79.6),
)
