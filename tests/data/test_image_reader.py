"""One reader for all images: upright everywhere, the same pixels everywhere, and never too large a picture."""

import io
import json
import os
import re
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import sima_attn
from sima_attn.data import images
from sima_attn.data.images import MAX_RATIO, MAX_RESIZED_RATIO, cut_ends, open_photo, read_image
from small_runs import picture

ORIENTATION = 0x0112
# As EXIF defines them: how a camera stored the upright picture.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}


def upright_pixels(height=30, width=24):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photo_bytes(orientation, kind="PNG", pixels=None, mode="RGB", **options):
    """A photo whose camera noted an orientation; lossless unless it is a JPEG."""
    pixels = upright_pixels() if pixels is None else pixels
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    buffer = io.BytesIO()
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](pixels))).convert(mode)
    stored.save(buffer, kind, exif=exif, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGB"), ("PNG", "L"), ("PNG", "P"), ("TIFF", "RGB"), ("WEBP", "RGB")]
)
def test_a_photo_is_upright_whatever_its_orientation(tmp_path, orientation, kind, mode):
    pixels = upright_pixels() // 128 * 255  # eight colors, which any palette has
    data = photo_bytes(orientation, kind, pixels, mode, **({"lossless": True} if kind == "WEBP" else {}))
    (tmp_path / "photo").write_bytes(data)
    expected = Image.fromarray(pixels).convert(mode).convert("RGB")
    assert np.array_equal(read_image(tmp_path / "photo"), expected)
    assert np.array_equal(read_image(io.BytesIO(data)), expected)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA"])
def test_other_kinds_of_images_become_rgb(tmp_path, mode):
    picture(99, mode=mode).save(tmp_path / "0.png")
    assert read_image(tmp_path / "0.png").mode == "RGB"


DEEP = np.linspace(0, 65535, 320).reshape(16, 20)


def deep_image(kind):
    """The same ramp from black to white, in more than 8 bits."""
    if kind in ("I;16", "I;16B"):
        return Image.frombytes(kind, (20, 16), DEEP.astype(">u2" if kind == "I;16B" else "<u2").tobytes())
    scaled = {"I": DEEP.astype(np.int32), "I, bytes": (DEEP / 257).astype(np.int32)}
    scaled |= {"F": (DEEP / 65535).astype(np.float32), "F, bytes": (DEEP / 257).astype(np.float32)}
    return Image.fromarray(scaled[kind])


@pytest.mark.parametrize("kind", ["I;16", "I;16B", "I", "I, bytes", "F", "F, bytes"])
def test_images_of_more_than_8_bits_are_scaled(tmp_path, kind):
    """Not clipped, which would make them almost white."""
    for name in ("0.tif", "0.png") if kind == "I;16" else ("0.tif",):
        deep_image(kind).save(tmp_path / name)
        image = read_image(tmp_path / name)
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image) - (DEEP / 257)[..., None]).max() <= 1


def read_by_everything(data: bytes, root: Path) -> dict[str, np.ndarray]:
    """The same photo through each way into the package."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from sima_attn.data.splits import open_data
    from sima_attn.detect.folders import open_split
    from sima_attn.export.quantize import open_images
    from sima_attn.serve.limits import Limits
    from sima_attn.serve.photos import decode

    for folder in ("folders/val/cat", "tar", "parquet", "coco/images"):
        (root / folder).mkdir(parents=True)
    file = root / "folders/val/cat/0.png"
    file.write_bytes(data)
    (root / "coco/images/0.png").write_bytes(data)
    with tarfile.open(root / "tar/val.tar", "w") as shard:
        for name, content in (("0.png", data), ("0.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    pq.write_table(pa.table({"image": [{"bytes": data}], "label": [0]}), root / "parquet/val.parquet")
    height, width = upright_pixels().shape[:2]
    image = {"id": 1, "file_name": "0.png", "width": width, "height": height}
    content = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (root / "coco/instances_val.json").write_text(json.dumps(content))
    graph = {"preprocessing": json.dumps({"size": 8, "mean": [0] * 3, "std": [1] * 3}), "preprocessing_inside": "true"}
    images = {name: open_data(root / name, "val").read(0) for name in ("folders", "tar", "parquet")}
    images |= {
        "classify, heat maps": open_photo(file),
        "detection": open_split(root / "coco", "val").read(0),
        "server": decode(data, Limits()),
        "quantize, files": next(iter(open_images(file.parent, graph))),
        "quantize, data": next(iter(open_images(root / "folders", graph))),
    }
    return {name: np.asarray(image) for name, image in images.items()}


@pytest.mark.parametrize("orientation", STORED)
def test_everything_reads_the_same_upright_pixels(tmp_path, orientation):
    for name, pixels in read_by_everything(photo_bytes(orientation), tmp_path).items():
        assert np.array_equal(pixels, upright_pixels()), name


def test_evaluation_and_classify_agree_on_a_photo_of_a_turned_phone(tmp_path):
    from sima_attn.data.cache import Cache
    from sima_attn.data.loader import BrokenImages, evaluation_batches
    from sima_attn.data.settings import Data
    from sima_attn.data.splits import open_data
    from sima_attn.explain.answer import classify
    from sima_attn.explain.photo_model import photo_model

    file = tmp_path / "val/cat/phone.jpg"
    file.parent.mkdir(parents=True)
    file.write_bytes(photo_bytes(6, "JPEG", quality=95))
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("sima_deit_tiny_patch16_224", **sizes).eval()
    subject = photo_model(model, classes=["a", "b", "c"], size=16)
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_pct": 1.0}
    shown = dict(classify(subject, open_photo(file), 3).classes)
    data, source = Data(str(tmp_path), size=16, workers=0), open_data(tmp_path, "val")
    ((images, _),) = evaluation_batches(source, data, 1, device=torch.device("cpu"), broken=BrokenImages(source))
    ((cached, _),) = Cache(source, data, torch.device("cpu"), broken=BrokenImages(source)).evaluation_batches(1)
    with torch.no_grad():
        for batch in (images, cached):
            assert model(batch)[0].softmax(0).tolist() == pytest.approx([shown[k] for k in "abc"], rel=1e-5)
        lying = model(images.rot90(dims=(2, 3)))[0].softmax(0).tolist()
    assert lying != pytest.approx([shown[k] for k in "abc"], rel=1e-3)  # the model does tell upright from lying


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_photo_with_damaged_exif_keeps_its_pixels(tmp_path):
    for exif in (
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03",
        b"\0" * 9,
    ):
        Image.fromarray(upright_pixels()).save(tmp_path / "photo.png", exif=exif)
        assert np.array_equal(read_image(tmp_path / "photo.png"), upright_pixels())


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "."])
def test_a_path_that_cannot_be_opened_is_an_error_of_that_image(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be read as an image: "):
        open_photo(tmp_path / name)


def test_image_files_are_opened_in_one_place():
    package = Path(sima_attn.__file__).parent
    opening = re.compile(r"\bImage\.open\(|\bimread\(")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if opening.search(path.read_text())}
    # The server has formats and limits of its own for uploads, and images of many gigapixels have no limit.
    assert found == {"data/images.py", "serve/photos.py", "gigapixel/sources.py"}


def test_features_of_an_older_reader_are_not_used_again(monkeypatch):
    from sima_attn.data.settings import Data
    from sima_attn.data.splits import open_data
    from sima_attn.probe import features

    pytest.importorskip("sklearn")
    facts = torch.nn.Identity(), open_data("digits"), Data("digits", size=8)
    now = features.key_of(*facts)
    assert features.key_of(*facts) == now
    monkeypatch.setattr(features, "READER_VERSION", features.READER_VERSION - 1)
    assert features.key_of(*facts) != now


def header_only(width, height):
    """A PNG of which all pixels are missing: decoding it fails."""
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue()[:33])
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data) + buffer.getvalue()[33:-20]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((300_000, 1), "300000 x 1 pixels; the longer side can be at most 100 times the shorter one: crop it"),
        ((1, 101), "1 x 101 pixels; the longer side"),
        ((15_000, 10_001), "15000 x 10001 pixels, at most 150 million are allowed: make it smaller"),
        ((60_000, 60_000), "exceeds limit of .* pixels"),  # refused by Pillow
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_large_a_picture_is_refused_before_it_is_decoded(tmp_path, size, message):
    from sima_attn.serve.limits import Limits, Refusal
    from sima_attn.serve.photos import decode

    (tmp_path / "photo.png").write_bytes(header_only(*size))
    with pytest.raises(ValueError, match=f"photo.png cannot be read as an image: .*{message}"):
        open_photo(tmp_path / "photo.png")
    with pytest.raises(Refusal, match=r"pixels") as refused:
        decode((tmp_path / "photo.png").read_bytes(), Limits(pixels=10**9))
    assert refused.value.status == 413


def test_pictures_at_the_limits_are_read():
    Image.new("L", (MAX_RATIO, 1)).save(strip := io.BytesIO(), "PNG")
    assert read_image(strip).size == (MAX_RATIO, 1)
    with pytest.raises(ValueError, match=r"truncated|incomplete"):  # of its size nothing is wrong
        read_image(io.BytesIO(header_only(10_000, 8_000)))


def resizing_transforms():
    from timm.data.transforms_factory import transforms_imagenet_eval
    from torchvision import transforms

    from sima_attn.data.loader import evaluation_transform, training_transform
    from sima_attn.data.settings import Augment, Data

    facts = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4), "crop_ratio": 0.875, "interpolation": "bicubic"}
    data = Data("", size=28, **facts)
    by_timm = transforms_imagenet_eval(
        28, crop_pct=0.875, interpolation="bicubic", mean=facts["mean"], std=facts["std"]
    )
    middle = transforms.Compose(
        [transforms.Resize(28, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(28)]
    )
    last = training_transform(data, Augment(crop="none", flip=0.0, color_jitter=0.0)).transforms[-1]
    return {
        "evaluation": (evaluation_transform(data.preprocessing), by_timm),
        "training": (
            training_transform(data, Augment(crop="none", flip=0.0, color_jitter=0.0)),
            transforms.Compose([middle, last]),
        ),
    }


@pytest.mark.parametrize("name", ["evaluation", "training"])
def test_a_strip_loses_its_ends_before_it_is_resized_and_ordinary_images_keep_their_bits(name, monkeypatch):
    ours, theirs = resizing_transforms()[name]
    for width, height in ((40, 30), (31, 57), (28, 28), (10, 100), (200, 20), (201, 21)):
        image = Image.fromarray(upright_pixels(height, width))
        assert torch.equal(ours(image), theirs(image)), (width, height)
    smooth = np.linspace(0, 255, 3001).astype(np.uint8)[:, None, None].repeat(30, 1).repeat(3, 2)
    for strip in (Image.fromarray(smooth), Image.fromarray(smooth.swapaxes(0, 1))):
        assert (ours(strip) - theirs(strip)).abs().max() < 0.05  # two levels of gray
    made, resize = [], Image.Image.resize

    def watched(image, size, *arguments, **options):
        made.append(size)
        return resize(image, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    for size in ((2000, 20), (20, 2000), (100, 1)):
        ours(Image.new("RGB", size))
    assert len(made) == 3
    assert max(max(size) for size in made) <= (MAX_RESIZED_RATIO + 1) * 32


def test_what_is_cut_off_a_strip_is_the_same_at_both_ends():
    for length in (101, 100, 99, 57):
        pixels = np.arange(length, dtype=np.uint8)[None].repeat(5, 0)
        kept = np.asarray(cut_ends(Image.fromarray(pixels)))
        assert kept.shape[1] in (min(length, 50), min(length, 51))
        assert kept[0, 0] - 0 == length - 1 - kept[0, -1]
        assert np.array_equal(np.asarray(cut_ends(Image.fromarray(pixels.T))), kept.T)


def test_a_cached_strip_is_cut_before_it_is_resized(tmp_path, monkeypatch):
    from sima_attn.data import cache, loader
    from sima_attn.data.loader import BrokenImages
    from sima_attn.data.settings import Data
    from sima_attn.data.splits import open_data

    (tmp_path / "train/a").mkdir(parents=True)
    Image.new("RGB", (2000, 20)).save(tmp_path / "train/a/0.png")
    seen = []
    monkeypatch.setattr(loader, "cut_ends", lambda image: seen.append(image.size) or cut_ends(image))
    source = open_data(tmp_path)
    cache.Cache(source, Data("", size=8), torch.device("cpu"), broken=BrokenImages(source))
    assert seen == [(2000, 20)]


@pytest.fixture
def pipe(tmp_path):
    """A pipe named like an image, in a class folder; a writer is there, so that reading it fails and does not hang."""
    folder = tmp_path / "train/cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    os.mkfifo(folder / "b.png")
    writer = os.open(folder / "b.png", os.O_RDWR)
    yield folder / "b.png"
    os.close(writer)


def test_a_pipe_among_images_is_named_and_left_out(pipe):
    from sima_attn.data.loader import BrokenImages, evaluation_batches
    from sima_attn.data.settings import Data
    from sima_attn.data.splits import open_data

    said = []
    assert [path.name for path, _ in images.open_photos(images.images_in(pipe.parent), say=said.append)] == ["a.png"]
    assert said[0] == f"skipped: {pipe} cannot be read as an image: it is not a regular file"
    source, said = open_data(pipe.parents[2]), []
    data, broken = Data("", size=8, workers=0), BrokenImages(source, said.append)
    ((_, labels),) = evaluation_batches(source, data, 2, device=torch.device("cpu"), broken=broken)
    assert len(labels) == 1
    assert said == [f"broken image, skipped (1 so far): {pipe}: it is not a regular file"]


def test_the_server_offers_no_pipe_as_a_sample(pipe):
    from sima_attn.serve.photos import find_samples

    assert list(find_samples(pipe.parent)) == ["a"]
