"""Small models with strong weights: initial ones leave LPI, biases and class attention almost without effect."""

import timm
import torch

from sima_attn import convert

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
XCIT = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def deit(**options):
    return timm.create_model("sima_deit_tiny_patch16_224", **{**VIT, **options})


def xcit(name="sima_xcit_nano_12_p8_224", **options):
    return timm.create_model(name, **{**XCIT, **options})


def mini(name, **options):
    return timm.create_model(name, **{"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, **options})


def converted(name, attention="sima", **options):
    model = timm.create_model(name, **options)
    convert(model, attention)
    return model


DYNAMIC = {**VIT, "dynamic_img_size": True, "dynamic_img_pad": True}
MODELS = {
    "deit": deit,
    "deit, average": lambda: deit(class_token=False, global_pool="avg"),
    "deit, token_ref": lambda: deit(token_ref="train"),
    "timm's vit, norms and registers": lambda: converted(
        "vit_tiny_patch16_224", **DYNAMIC, qk_norm=True, reg_tokens=3, init_values=0.5, pre_norm=True
    ),
    "timm's deit 3": lambda: converted("deit3_small_patch16_224", **DYNAMIC),
    "mini vit, local mixer": lambda: mini("sima_vit_mini_patch4_64_local"),
    "deit, sima_local": lambda: deit(attention="sima_local"),
    "timm's vit, sima_local and registers": lambda: converted(
        "vit_tiny_patch16_224", "sima_local", **DYNAMIC, qk_norm=True, reg_tokens=3
    ),
    "deit, sima_rope": lambda: deit(attention="sima_rope", attention_options={"grid_ref": (4, 4)}),
    "deit, relu2_rope": lambda: deit(attention="relu2_rope", attention_options={"grid_ref": (4, 4)}, reg_tokens=1),
    "deit, relu2": lambda: deit(attention="relu2"),
    "deit, relu2_wide": lambda: deit(attention="relu2_wide"),
    "xcit": xcit,
    "xcit, 16 px, average": lambda: xcit("sima_xcit_nano_12_p16_224", global_pool="avg", tokens_norm=True),
    "xcit, token_ref": lambda: xcit(token_ref="train", class_token_ref=4.0),
    "xcit, sima_local": lambda: xcit(attention="sima_local", class_attention="sima"),
    "xcit, sima_rope": lambda: xcit(attention="sima_rope", class_attention="sima"),
    "xcit without lpi": lambda: xcit("sima_xcit_nano_12_p8_224_nolpi"),
    "timm's xcit": lambda: converted("xcit_nano_12_p8_224", **XCIT),
    "mini xcit": lambda: mini("sima_xcit_mini_p4_64_relu"),
}


def build(name, **options):
    torch.manual_seed(0)
    return strong(MODELS[name](**options))


@torch.no_grad()
def strong(model):
    """Weights with which every part of the model matters, in eval mode."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()
