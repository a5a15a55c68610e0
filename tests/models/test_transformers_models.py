"""Image models of transformers with timm's interface, their preprocessing, and loading them from folders."""

import importlib
import json

import pytest
import torch
from PIL import Image

from closeness import assert_close
from sima_attn import convert, load, save
from sima_attn.data.loader import evaluation_transform
from sima_attn.models.huggingface import (
    TimmInterface,
    describe,
    save_folder,
    with_timm_interface,
)
from sima_attn.models.huggingface import (
    build as build_described,
)
from sima_attn.models.image_processor import preprocessing_of, write_processor
from sima_attn.models.loading import load_model
from sima_attn.models.preprocessing import Preprocessing
from transformers_models import HONORED, VISION, build, build_clip, image, outputs

transformers = pytest.importorskip("transformers")

OWN = Preprocessing(32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.8, "bilinear")


def test_a_classifier_gives_tokens_and_logits_in_one_forward():
    classifier = build(HONORED, "vit_classifier")
    model = TimmInterface(classifier, OWN).eval()
    tokens, logits = model.tokens_and_logits(image())
    assert torch.equal(logits, outputs(classifier, pixel_values=image()))
    assert torch.equal(tokens, outputs(classifier.vit, pixel_values=image()))
    assert torch.equal(model(image()), logits)
    assert model.num_classes == 2
    model.reset_classifier(0)
    assert_close(model(image()), tokens.mean(1), 1e-6)  # a ViT under a classifier has no pooler


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_of_a_model_for_images_and_texts_the_vision_model_runs(name):
    whole = build_clip(name)
    model = TimmInterface(whole, OWN).eval()
    out = whole.vision_model(image())
    tokens, logits = model.tokens_and_logits(image())
    assert torch.equal(tokens, out.last_hidden_state)
    assert logits.shape == (2, 0)
    assert torch.equal(model(image()), out.pooler_output)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "clip", "siglip"])
def test_images_of_another_size_are_taken(name):
    model = TimmInterface(build(HONORED, name), OWN).eval()
    larger = torch.randn(1, 3, 48, 48)
    assert model.tokens_and_logits(larger)[0].shape[1] == model.tokens_and_logits(image())[0].shape[1] - 16 + 36


def test_preprocessing_without_a_processor_is_that_of_the_family():
    assert preprocessing_of(build(HONORED, "dinov2")).mean == (0.485, 0.456, 0.406)
    assert preprocessing_of(build(HONORED, "siglip")).mean == (0.5, 0.5, 0.5)
    clip = preprocessing_of(build_clip())
    assert clip.size == 32
    assert clip.mean[0] == pytest.approx(0.4815, abs=1e-4)


@pytest.mark.parametrize(
    ("entries", "size", "crop_ratio", "crop_mode"),
    [
        ({"size": {"height": 48, "width": 48}}, 48, 1.0, "squash"),
        ({"size": {"shortest_edge": 64}, "crop_size": 48, "do_center_crop": True}, 48, 0.75, "center"),
        ({"size": {"shortest_edge": 64}, "crop_size": 48, "do_center_crop": False}, 64, 1.0, "center"),
        ({"size": 48, "crop_size": 48}, 48, 1.0, "squash"),
        ({"size": 48, "crop_size": 48, "do_center_crop": True}, 48, 1.0, "center"),
        ({"size": 48, "do_resize": False}, 32, 1.0, "center"),
    ],
)
def test_preprocessing_is_read_from_the_processor_in_the_folder(entries, size, crop_ratio, crop_mode, tmp_path):
    build(HONORED, "vit").save_pretrained(tmp_path)
    model = transformers.ViTModel.from_pretrained(tmp_path)
    entries = {**entries, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    expected = Preprocessing(size, OWN.mean, OWN.std, crop_ratio, "bilinear", crop_mode)
    assert preprocessing_of(model) == expected  # a model knows where it was loaded from
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": entries}))
    assert preprocessing_of(model) == expected
    (tmp_path / "processor_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"processor_config\.json does not describe an image processor"):
        preprocessing_of(model)


def test_a_written_folder_has_the_model_and_its_preprocessing(tmp_path):
    classifier = build(HONORED, "vit_classifier")
    classifier.config.id2label = {0: "cat", 1: "dog"}
    convert(classifier, "sima_local")
    save_folder(TimmInterface(classifier, OWN), tmp_path, OWN)
    loaded = load_model(tmp_path)
    assert loaded.preprocessing == OWN
    assert loaded.classes == ["cat", "dog"]
    assert not loaded.model.training
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.crop_size["height"] == 32
    assert processor.size["shortest_edge"] == 40
    assert list(processor.image_mean) == list(OWN.mean)
    for model in (load(tmp_path), transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()):
        assert type(model).__name__ == "ViTForImageClassification"
        assert not model.training
        assert_close(outputs(model, pixel_values=image()), outputs(classifier, pixel_values=image()), 1e-6)


def test_any_folder_of_save_pretrained_is_loaded(tmp_path):
    for name, model in {"softmax": build(HONORED, "dinov2"), "part": build_clip()}.items():
        if name == "part":
            convert(model.vision_model)  # only the part is marked
        model.save_pretrained(tmp_path / name)
        loaded = load(tmp_path / name)
        assert type(loaded).__name__ == type(model).__name__
        assert loaded.state_dict().keys() == model.state_dict().keys()
        wrapped = load_model(tmp_path / name, features=True).model
        assert wrapped(image()).shape == (2, 32)


def test_a_model_is_built_again_from_its_description():
    clip = build_clip()
    description = json.loads(json.dumps(describe(clip)))
    again = build_described(description)
    assert type(again) is type(clip)
    assert {name: w.shape for name, w in again.state_dict().items()} == {
        name: w.shape for name, w in clip.state_dict().items()
    }
    with pytest.raises(ValueError, match="has no model class 'Nothing'"):
        build_described({**description, "class": "Nothing"})


def test_wrong_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder or file nowhere"):
        load("nowhere")
    text = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    text.save_pretrained(tmp_path / "text")
    assert type(load(tmp_path / "text")) is transformers.BertModel
    with pytest.raises(ValueError, match="BertModel takes 'input_ids'; an image model is needed"):
        load_model(tmp_path / "text")
    build(HONORED, "timm").save_pretrained(tmp_path / "timm")
    with pytest.raises(ValueError, match="TimmWrapperForImageClassification holds a timm model; give that one"):
        load_model(tmp_path / "timm")
    build(HONORED, "vit").save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="ema weights are in the checkpoints"):
        load_model(tmp_path / "vit", branch="ema")
    config = tmp_path / "vit" / "config.json"
    config.write_text(config.read_text().replace('"ViTModel"', '"ViTsModel"'))
    with pytest.raises(ValueError, match="has no model class 'ViTsModel'"):
        load(tmp_path / "vit")
    with pytest.raises(ValueError, match="gets no new classifier here"):
        TimmInterface(transformers.ViTModel(transformers.ViTConfig(**VISION)), OWN).reset_classifier(5)


PROCESSORS = {
    "ViT": transformers.ViTImageProcessor(size={"height": 48, "width": 48}),
    "SigLIP": transformers.SiglipImageProcessor(size={"height": 48, "width": 48}),
    "CLIP": transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 48, "width": 48}),
    "DINOv2": transformers.BitImageProcessor(size={"shortest_edge": 50}, crop_size={"height": 42, "width": 42}),
    "CvT": transformers.ConvNextImageProcessor(size={"shortest_edge": 48}, crop_pct=0.875),
    "CvT, large": transformers.ConvNextImageProcessor(size={"shortest_edge": 384}),
    "no mean": transformers.ViTImageProcessor(size={"height": 48, "width": 48}, do_normalize=False),
    "another scale": transformers.ViTImageProcessor(size={"height": 48, "width": 48}, rescale_factor=1 / 128),
    "bytes": transformers.ViTImageProcessor(size={"height": 48, "width": 48}, do_rescale=False, image_mean=[9.0] * 3),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_photo_enters_as_the_image_processor_prepares_it(name, tmp_path):
    """Within two gray levels: PIL rounds to bytes. A processor that we write does the same."""
    model, processor = build(HONORED, "vit"), PROCESSORS[name]
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    ours = load_model(tmp_path).preprocessing
    smooth = torch.nn.functional.interpolate(image(1), (90, 130), mode="bicubic")[0].permute(1, 2, 0)
    photo = Image.fromarray((60 * smooth + 128).clamp(0, 255).byte().numpy())
    level = 2 / 255 / min(ours.std)
    entered = evaluation_transform(ours)(photo)
    assert_close(entered, processor(photo, return_tensors="pt").pixel_values[0], level)
    write_processor(ours, tmp_path)
    assert load_model(tmp_path).preprocessing == ours
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert_close(entered, again(photo, return_tensors="pt").pixel_values[0], level)


@pytest.mark.parametrize(("size", "resized"), [(224, 354), (9, 14), (336, 336), (224, 256)])
def test_the_side_before_the_crop_is_exact(size, resized, tmp_path):
    model = build(HONORED, "vit")
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": resized}, crop_size={"height": size, "width": size}
    )
    processor.save_pretrained(tmp_path)
    assert preprocessing_of(model, tmp_path).resized == resized


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"resample": 1}, r"resample must be 2 \(bilinear\) or 3 \(bicubic\), got 1"),
        ({"size": {"height": 32, "width": 48}}, "images must be square"),
        ({"image_mean": [0.5]}, "mean must be three numbers"),
    ],
)
def test_an_image_processor_that_cannot_be_honored_is_an_error(entries, message, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"the image processor in .* cannot be used: {message}"):
        preprocessing_of(build(HONORED, "vit"), tmp_path)


@pytest.mark.parametrize(
    ("name", "prefix"), [("vit", 1), ("deit", 2), ("dinov2_registers", 5), ("clip", 1), ("siglip", 0)]
)
def test_layers_norm_and_prefix_tokens_are_found(name, prefix):
    model = with_timm_interface(build(HONORED, name)).eval()
    assert len(model.blocks) == 2
    assert isinstance(model.norm, torch.nn.LayerNorm)
    assert model.num_prefix_tokens == prefix
    features, tokens = model.features_and_tokens(image())
    assert torch.equal(features, model(image()))
    assert tokens.shape == (2, 16 + prefix, 32)


def test_placeholders_are_no_names_of_classes(tmp_path):
    build(HONORED, "vit_classifier").save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.classes is None
    assert loaded.class_name(1) == "class 1"


def test_saving_a_model_keeps_its_image_processor(tmp_path):
    build(HONORED, "vit").save_pretrained(tmp_path / "first")
    write_processor(OWN, tmp_path / "first")
    model = load(tmp_path / "first")
    convert(model)
    save(model, tmp_path / "second")
    assert load_model(tmp_path / "second").preprocessing == OWN


@pytest.mark.parametrize("refused", ["gigapixel.network.network_of", "parallel.api.check_model"])
def test_errors_name_the_model_of_the_user(refused):
    module, name = refused.rsplit(".", 1)
    function = getattr(importlib.import_module(f"sima_attn.{module}"), name)
    with pytest.raises(ValueError, match="ViTModel"):
        function(TimmInterface(build(HONORED, "vit"), OWN))
