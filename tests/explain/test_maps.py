"""The paper's heat maps: laws of the map, its place on the image, and the files that are written."""

import weakref

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from small_models import MODELS, build, deit, image, timm_vit
from torch import nn

from sima_attn.data.images import open_photo
from sima_attn.explain import effect, heatmap, heatmaps, read_attention
from sima_attn.explain.effects import attention_statistics, effect_scores
from sima_attn.explain.maps import spread, unit_range
from sima_attn.explain.photo_model import load_photo_model, photo_model
from sima_attn.models import loading
from sima_attn.nn import ATTENTIONS, SimAttention


@pytest.mark.parametrize("size", [(32, 48), (29, 61), (64, 16)])
@pytest.mark.parametrize("name", MODELS)
def test_a_map_has_the_size_of_the_image_and_reaches_from_0_to_1(name, size):
    drawn = heatmap(build(name), image(*size), of="k")
    assert drawn.shape == size
    assert (drawn.min(), drawn.max()) == (0, 1)


class Stamp(nn.Module):
    """One SimA layer over patches whose query is their brightness, and whose key is its opposite."""

    def __init__(self, class_token: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 2, 8, stride=8, bias=False)
        self.attn = SimAttention(2, 1, qkv_bias=False)
        self.class_token = class_token
        with torch.no_grad():
            self.patch.weight.copy_(torch.stack([torch.full((3, 8, 8), 1 / 192), torch.full((3, 8, 8), -1 / 192)]))
            self.attn.qkv.weight.copy_(torch.tensor([[1.0, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 1]]))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([torch.full_like(x[:, :1], 100.0), x], 1) if self.class_token else x
        return self.attn(x).mean(1)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("of", ["q", "k"])
def test_the_bright_patch_is_where_the_map_is_1_and_the_class_token_is_nowhere(of, class_token):
    photo = torch.zeros(3, 24, 40)
    photo[:, 8:16, 24:32] = 1.0
    drawn = heatmap(Stamp(class_token), photo, of=of)
    assert np.unravel_index(drawn.argmax(), drawn.shape)[0] in range(8, 16)
    assert drawn[8:16, 24:32].min() > 0.2
    assert (drawn[:, :16] == 0).all()


def test_scaling_a_channel_of_q_changes_simas_map_not_at_all():
    model = build("deit")
    before = heatmap(model, image())
    with torch.no_grad():
        model.blocks[-1].attn.qkv.weight[:5] *= 7
        model.blocks[-1].attn.qkv.bias[:5] *= 7
    assert np.abs(heatmap(model, image()) - before).max() < 1e-4


def q_hat_and_k_hat(model, photo):
    """Q / |Q|_1 and K / |K|_1 [H, N, D] of the last layer, from the output of its projection."""
    attention, seen = model.blocks[-1].attn, []
    hook = attention.qkv.register_forward_hook(lambda module, given, out: seen.append(out[0].detach()))
    model(photo)
    hook.remove()
    q, k, _ = seen[0].unflatten(-1, (3, attention.num_heads, -1)).permute(1, 2, 0, 3)  # [H, N, D] each
    return (x / x.abs().sum(1, keepdim=True) for x in (q, k))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_maps_join_all_heads(heads):
    """A heat map is the norm over the channels of all heads, an effect the mean of the heads' matrices."""
    model, photo = deit(num_heads=heads), image(32, 32)
    layer = read_attention(model, photo).layers[-1]
    q, k = q_hat_and_k_hat(model, photo)
    for of, x in (("q", q), ("k", k)):
        expected = torch.cat(list(x), dim=1).norm(dim=1)[1:]  # without the class token
        assert torch.allclose(layer.scores(of).flatten(), expected, rtol=1e-4)
    matrix = sum(q[head] @ k[head].T for head in range(heads)) / heads  # [N, N]
    assert torch.allclose(effect_scores(layer, (2, 3)).flatten(), matrix[1 + 2 * 4 + 3, 1:], rtol=1e-3, atol=1e-7)


def test_all_layers_at_once_are_those_one_by_one():
    model = build("deit")
    maps = heatmaps(model, image(), of="q")
    assert list(maps) == [f"blocks.{i}.attn" for i in range(3)]
    for index, drawn in enumerate(maps.values()):
        assert np.array_equal(drawn, heatmap(model, image(), layer=index))


def test_padding_is_cut_off_not_squeezed_in():
    scores = torch.tensor([[[0.0, 1.0], [0.0, 9.0]]])
    whole = spread(scores, (1.0, 1.0), (32, 32))
    assert np.array_equal(spread(scores, (0.75, 0.5), (24, 16)), whole[:24, :16])
    assert (unit_range(np.full((2, 2), 3.0)) == 0).all()


def test_a_photo_enters_with_its_shape_and_about_the_tokens_of_training(tmp_path):
    subject = photo_model(deit(img_size=64))
    assert (subject.any_size, subject.any_shape) == (True, True)
    for size in [(400, 300), (300, 400), (4000, 10), (10, 10), (7, 3000)]:
        height, width = subject.input_size(*size, 64)
        assert height % 8 == width % 8 == 0
        assert 48 <= height * width // 64 <= 70
    assert subject.input_size(400, 300, 64) == (56, 72)
    path = tmp_path / "photo.png"
    Image.new("RGB", (37, 50), (200, 10, 10)).save(path)
    model = deit()
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32)}
    assert heatmap(model, path).shape == heatmap(model, Image.open(path)).shape == (50, 37)


def test_at_another_size_simas_output_has_the_scale_of_training():
    photo = Image.effect_noise((60, 60), 80).convert("RGB")
    model = deit()
    subject = photo_model(model, size=32)
    plain, large = subject.read(photo).output, subject.read(photo, 64).output
    with torch.no_grad():
        assert torch.equal(plain, model(subject.prepare(photo)))
        assert (large - model(subject.prepare(photo, 64))).abs().max() > 1e-3
        for block in model.blocks:
            assert block.attn.token_ref is None  # left as it was
            block.attn.token_ref = 17.0  # 4 x 4 patches and the class token
        assert torch.equal(large, model(subject.prepare(photo, 64)))
        model.blocks[0].attn.token_ref = 40.0  # its own stays
        assert torch.equal(subject.read(photo, 64).output, model(subject.prepare(photo, 64)))
    softmax = photo_model(deit(attention="softmax"), size=32)
    assert softmax.read(photo, 64).layers[0].q_grid == (8, 8)


def test_a_model_of_one_size_gets_the_photo_squeezed_and_says_so_of_other_sizes():
    model = timm_vit(dynamic_img_size=False)
    subject = photo_model(model, size=32)
    assert (subject.any_size, subject.any_shape) == (False, False)
    assert subject.prepare(Image.new("RGB", (90, 30))).shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match="images of 32 px only, got size=64"):
        subject.input_size(90, 30, 64)


def test_what_comes_with_the_package_is_the_default():
    loaded = load_photo_model()
    assert (loaded.name, loaded.trained) == (loading.DEFAULT, True)


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no photo"):
        heatmap(deit(), tmp_path / "none.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        heatmap(deit(), tmp_path / "broken.png")
    with pytest.raises(ValueError, match="image must be"):
        heatmap(deit(), image(batch=2))
    with pytest.raises(ValueError, match=r"image must be .* got ndarray; .* use PIL\.Image\.fromarray"):
        heatmap(deit(), np.zeros((32, 32, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"unknown model.* did you mean 'sima_deit"):
        load_photo_model("sima_deit_tinny_patch16_224")
    with pytest.raises(ValueError, match="no timm configuration"):
        heatmap(Stamp(), Image.new("RGB", (8, 8)))


def test_a_photo_of_more_than_8_bits_is_scaled_and_turned(tmp_path):
    """Not clipped, which would make it almost white."""
    ramp = np.linspace(0, 65535, 48 * 32).reshape(32, 48)
    photo = Image.fromarray(ramp.astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    photo.save(tmp_path / "deep.png", exif=exif)
    turned = np.asarray(open_photo(tmp_path / "deep.png"))
    assert np.abs(turned - (ramp / 257)[::-1, ::-1, None]).max() <= 1
    subject = load_photo_model("sima_deit_tiny_patch16_224")
    plain = Image.fromarray((ramp / 257).astype(np.uint8)).convert("RGB")
    assert torch.allclose(subject.prepare(photo), subject.prepare(plain), atol=0.05)
    Image.fromarray(np.float32([[0, 1e6]])).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"float\.tif cannot be read as an image: it has floats from 0 to 1e\+06"):
        open_photo(tmp_path / "float.tif")


def test_weights_of_ones_own_are_loaded_by_name_and_file(tmp_path):
    model = timm.create_model("sima_deit_tiny_patch16_224", num_classes=7, depth=12)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    subject = load_photo_model(f"sima_deit_tiny_patch16_224={tmp_path / 'own.pth'}")
    assert subject.trained
    assert subject.class_name(3) == "class 3"
    assert torch.equal(subject.model.head.weight, model.head.weight)
    with pytest.raises(ValueError, match="does not fit sima_deit_small"):
        load_photo_model(f"sima_deit_small_patch16_224={tmp_path / 'own.pth'}")


def test_an_effect_is_a_signed_row_of_the_matrix():
    model = build("deit")
    layer = read_attention(model, image(32, 32)).layers[-1]
    row = layer.matrix()[0, :, 1 + 2 * 4 + 3, 1:].mean(0)  # patch (2, 3) of 4 x 4, after the class token
    drawn = effect(model, image(32, 32), patch=(2, 3))
    assert np.abs(drawn).max() == 1
    centers = drawn[4::8, 4::8] / np.abs(drawn[4::8, 4::8]).max()
    assert np.abs(centers.flatten() - (row / row.abs().max()).numpy()).max() < 0.35  # bilinear, half a pixel off
    assert (effect(build("deit, softmax"), image(32, 32), patch=(0, 0)) >= 0).all()
    with pytest.raises(ValueError, match=r"from \(0, 0\) to \(3, 3\), got \(4, 0\)"):
        effect(model, image(32, 32), patch=(4, 0))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_effect_is_shown_of_every_attention_with_a_matrix_of_tokens(attention):
    model = deit(attention=attention, class_token=False, global_pool="avg", img_size=32)
    if attention == "xca":
        with pytest.raises(ValueError, match="its matrix is of channels"):
            effect(model, image(32, 32), patch=(2, 3))
    else:
        assert np.abs(effect(model, image(32, 32), patch=(2, 3))).max() == 1


def test_statistics_tell_sima_from_softmax_and_one_channel_from_many():
    sima, softmax = (
        attention_statistics([read_attention(build(name), image(batch=2))] * 2, name)
        for name in ("deit", "deit, softmax")
    )
    assert [row.layer for row in sima] == [0, 1, 2]
    assert all(0 < row.negative_share < 1 and row.images == 4 for row in sima)
    assert all(row.negative_share == 0 for row in softmax)
    assert all(1 / row.D <= row.largest_channel_share <= 1 for row in [*sima, *softmax])
    (alone,) = attention_statistics([read_attention(Stamp(), torch.rand(1, 3, 24, 40))], "one channel")
    assert alone.largest_channel_share == 1


def test_statistics_keep_no_reading():
    """The queries and keys of all layers of thousands of photos would not fit in memory."""
    layers = []

    def read(_):
        assert sum(layer() is not None for layer in layers) <= 1
        reading = read_attention(build("deit"), image())
        layers.append(weakref.ref(reading.layers[0]))
        return reading

    assert attention_statistics(map(read, range(4)), "one by one")[0].images == 4


@pytest.mark.parametrize("family", ["vit_classifier", "dinov2", "clip", "siglip", "CLIP", "Siglip"])
def test_a_photo_is_mapped_by_a_model_of_transformers(family, tmp_path):
    """As the image processor normalizes it; the layers have their paths in the model."""
    models = pytest.importorskip("transformers_models")
    model = models.build(models.HONORED, family) if family.islower() else models.build_clip(family)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    drawn = heatmaps(model, tmp_path / "photo.png")
    assert [one.shape for one in drawn.values()] == [(20, 30)] * 2
    paths = dict(model.named_modules())
    assert all(path in paths for path in drawn)
    assert np.array_equal(heatmap(model, photo), list(drawn.values())[-1])


def test_a_model_without_attention_has_no_maps():
    assert photo_model(deit(img_size=32), size=32).has_maps
    assert not photo_model(timm.create_model("resnet10t"), size=32).has_maps
