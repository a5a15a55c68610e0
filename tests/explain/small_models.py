"""Models of a few thousand parameters, one of each kind that can be read."""

import timm
import torch

from sima_attn import convert

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
XCIT = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
CVT = {"embed_dims": (16, 32, 48), "depths": (1, 1, 2), "num_heads": (1, 2, 3), "num_classes": 5}


def deit(**options):
    return timm.create_model("sima_deit_tiny_patch16_224", **{**VIT, **options})


def xcit(**options):
    return timm.create_model("sima_xcit_nano_12_p8_224", **{**XCIT, **options})


def cvt(**options):
    return timm.create_model("sima_cvt_13", **{**CVT, **options})


def timm_vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224", **{**VIT, "dynamic_img_size": True, "dynamic_img_pad": True, **options}
    )


def converted(model):
    convert(model)
    return model


MODELS = {
    "deit": deit,
    "deit, softmax": lambda: deit(attention="softmax"),
    "deit, one projection for q and k": lambda: deit(attention="soft_full"),
    "xcit": xcit,
    "xcit, xca": lambda: xcit(attention="xca"),
    "cvt": cvt,
    "cvt, softmax": lambda: cvt(attention="softmax"),
    "timm's vit": timm_vit,
    "timm's vit, converted": lambda: converted(timm_vit()),
    "timm's vit, norms and registers": lambda: timm_vit(qk_norm=True, reg_tokens=3),
    "timm's xcit, converted": lambda: converted(timm.create_model("xcit_nano_12_p8_224", **XCIT)),
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def image(height=32, width=48, batch=1):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))
