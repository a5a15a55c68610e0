"""transformers' models, built small from configurations. Nothing is downloaded."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8},
    "pretrained_cfg": {"input_size": [3, 32, 32]},
    "do_pooling": True,
}
# name -> (model class, configuration class, arguments)
HONORED = {
    "vit": ("ViTModel", "ViTConfig", VISION),
    "vit_classifier": ("ViTForImageClassification", "ViTConfig", VISION),
    "deit": ("DeiTModel", "DeiTConfig", VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "beit": ("BeitModel", "BeitConfig", VISION),
    "vit_msn": ("ViTMSNModel", "ViTMSNConfig", VISION),
    "ijepa": ("IJepaModel", "IJepaConfig", VISION),
    "yolos": ("YolosModel", "YolosConfig", {**VISION, "image_size": [32, 32]}),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**VISION, "num_register_tokens": 4}),
    "timm": ("TimmWrapperForImageClassification", "TimmWrapperConfig", TIMM),
}
DECODER = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
MASKED = {"vit_mae": ("ViTMAEForPreTraining", "ViTMAEConfig", {**VISION, **DECODER, "decoder_intermediate_size": 64})}
SILENT = {
    "cvt": ("CvtModel", "CvtConfig", {"embed_dim": [16, 48, 96], "depth": [1, 2, 3], "image_size": 32}),
    "pvt_v2": ("PvtV2Model", "PvtV2Config", {"depths": [1, 1, 1, 1], "image_size": 32}),
}


def build(table, name):
    model, config, options = table[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).eval()


def build_clip(family="CLIP"):
    """CLIP or SigLIP: a vision and a text model."""
    config = getattr(transformers, f"{family}Config")(text_config={**TEXT, **TOKENS}, vision_config=VISION)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}Model")(config).eval()


def image(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def outputs(model, **inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def features(model):
    if not hasattr(model, "get_image_features"):
        return outputs(model, pixel_values=image())
    with torch.no_grad():
        return model.get_image_features(pixel_values=image()).pooler_output
