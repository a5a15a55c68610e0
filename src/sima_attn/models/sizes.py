"""The sizes of our models: name -> arguments. Free of torch, so that the names are listed without waiting for it.

`img_size` is the training size, 224 where there is none.
"""

from typing import Any

Sizes = dict[str, dict[str, Any]]

DEIT_WIDTHS: Sizes = {
    "tiny": {"embed_dim": 192, "num_heads": 3},
    "small": {"embed_dim": 384, "num_heads": 6},
    "base": {"embed_dim": 768, "num_heads": 12},
}
# The variants of the paper: a single head, ReLU in place of GELU (then the whole network is free of exp()),
# and LayerScale, which the authors' listing has.
DEIT_VARIANTS: Sizes = {
    "": {},
    "_1head": {"num_heads": 1},
    "_relu": {"relu": True},
    "_layerscale": {"init_values": 1.0},
}
DEIT: Sizes = {
    f"sima_deit_{width}_patch16_{px}{suffix}": {"patch_size": 16, "depth": 12, **size, **variant, "img_size": px}
    for width, size in DEIT_WIDTHS.items()
    for px in (224, 384)
    for suffix, variant in DEIT_VARIANTS.items()
}

# LayerScale starts at 1.0 with 12 layers and at 1e-5 with more; the paper does not state it for 20 layers.
XCIT_WIDTHS: Sizes = {
    "nano_12": {"embed_dim": 128, "depth": 12, "num_heads": 4, "eta": 1.0, "tokens_norm": False},
    "tiny_12": {"embed_dim": 192, "depth": 12, "num_heads": 4, "eta": 1.0, "tokens_norm": True},
    "small_12": {"embed_dim": 384, "depth": 12, "num_heads": 8, "eta": 1.0, "tokens_norm": True},
    "tiny_20": {"embed_dim": 192, "depth": 20, "num_heads": 4, "eta": 1e-5, "tokens_norm": True},
    "tiny_24": {"embed_dim": 192, "depth": 24, "num_heads": 4, "eta": 1e-5, "tokens_norm": True},
    "small_24": {"embed_dim": 384, "depth": 24, "num_heads": 8, "eta": 1e-5, "tokens_norm": True},
    "medium_24": {"embed_dim": 512, "depth": 24, "num_heads": 8, "eta": 1e-5, "tokens_norm": True},
    "large_24": {"embed_dim": 768, "depth": 24, "num_heads": 16, "eta": 1e-5, "tokens_norm": True},
}
XCIT_PATCHES = {name: (16,) if name == "tiny_20" else (16, 8) for name in XCIT_WIDTHS}
XCIT_VARIANTS: Sizes = {"": {}, "_relu": {"relu": True}, "_nolpi": {"lpi": False}}
XCIT: Sizes = {
    f"sima_xcit_{width}_p{patch}_224{suffix}": {**size, **variant, "patch_size": patch}
    for width, size in XCIT_WIDTHS.items()
    for patch in XCIT_PATCHES[width]
    for suffix, variant in XCIT_VARIANTS.items()
}

CVT: Sizes = {"sima_cvt_13": {"depths": (1, 2, 10)}, "sima_cvt_21": {"depths": (1, 4, 16)}}

# The models for images of 64 pixels.
MINI_PX = 64
MINI_VIT_VARIANTS: Sizes = {
    "": {},
    "_1head": {"num_heads": 1},
    "_relu": {"relu": True},
    "_local": {"local_mixer": True},
}
MINI_VIT: Sizes = {
    f"sima_vit_mini_patch4_64{suffix}": {
        "img_size": MINI_PX,
        "patch_size": 4,
        "embed_dim": 192,
        "depth": 12,
        "num_heads": 3,
        "class_token": False,
        "global_pool": "avg",
        **variant,
    }
    for suffix, variant in MINI_VIT_VARIANTS.items()
}
# XCiT-Tiny's width and class attention; ten layers instead of twelve, to stay under 6 M parameters.
MINI_XCIT: Sizes = {
    f"sima_xcit_mini_p4_64{suffix}": {
        "img_size": MINI_PX,
        "embed_dim": 192,
        "depth": 10,
        "num_heads": 4,
        "eta": 1.0,
        "tokens_norm": True,
        **variant,
    }
    for suffix, variant in XCIT_VARIANTS.items()
}
