"""`features` and `sima features`: outputs, resuming, and faults in the middle."""

import errno
import json
import os
import signal

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from tiled_models import VIT, build
from typer.testing import CliRunner

import forked
from closeness import assert_close
from full_disk import no_file_above
from sima_attn import cli, linearize, save
from sima_attn._files import DiskFullError, lock
from sima_attn.gigapixel import features, sweeps
from sima_attn.gigapixel.stores import FileArray
from sima_attn.models.loading import load_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.grid import on_grid
from small_runs import class_folders

HOW = Preprocessing(32, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
TILE = 3
TILES = 3 * 3 * 4  # of the image below in all sweeps of a model with 3 blocks


@pytest.fixture
def photo(tmp_path):
    """An image of 72 x 60 pixels: 9 rows of 8 tokens."""
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (72, 60, 3), dtype=np.uint8)).save(path)
    return path


def model(name="xcit"):
    return build(name, depth=3)


def run(photo, out, **options):
    return features(model(), photo, out, preprocessing=HOW, tile=TILE, **options)


def read(path):
    return np.load(path) if path.suffix == ".npy" else zarr.open_array(path, mode="r")[:]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("store", ["auto", "disk", "memory"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("suffix", ["npy", "zarr"])
def test_the_features_are_those_in_memory(suffix, dtype, store, photo, tmp_path):
    expected = run(photo, None).features
    done = run(photo, tmp_path / f"f.{suffix}", dtype=dtype, store=store)
    written = read(done.path)
    assert (written.dtype, written.shape) == (np.dtype(dtype), (9, 8, 32)) == (written.dtype, done.shape)
    assert_close(torch.from_numpy(written).float(), expected, 1e-6 if dtype == "float32" else 1e-3)
    assert (done.sweeps, done.tiles, done.resumed_at, done.height, done.width) == (4, TILES, 0, 72, 60)
    assert done.store_bytes == 2 * 72 * 32 * 4
    assert names(tmp_path) == [f"f.{suffix}", "photo.png"]


def test_an_earlier_output_is_replaced(photo, tmp_path):
    for suffix in ("npy", "zarr"):
        out = tmp_path / f"f.{suffix}"
        for tile in (1, 9):  # chunks of other sizes
            features(model(), photo, out, preprocessing=HOW, tile=tile)
        assert_close(torch.from_numpy(read(out)), run(photo, None).features, 1e-5)


def features_and_die(place, photo, out):
    """Run until so many tiles are done, and then die as of `kill -9`."""

    def on_step(what, done, total):
        if done == place and "tile" in what:
            os.kill(os.getpid(), signal.SIGKILL)

    sweeps.SAVE_SECONDS = 0
    run(photo, out, on_step=on_step)


@pytest.mark.parametrize("suffix", ["npy", "zarr"])
def test_killed_and_resumed_equals_never_stopped(suffix, photo, tmp_path):
    whole, out = (tmp_path / f"{name}.{suffix}" for name in ("whole", "resumed"))
    expected = run(photo, whole)
    # In the embedding, at the start of a sweep, in a block with LPI, and while the features are written.
    for place in (4, 9, 24, 31):
        code = forked.run(tmp_path / "log", features_and_die, place, photo, out)
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert not out.exists()
        record = torch.load(out.with_name(f"{out.name}.work") / "progress.pt", weights_only=True)
        assert 9 * record["sweep"] + record["tile"] == place
    done = run(photo, out)
    assert done.resumed_at == 31
    assert np.array_equal(read(out), read(whole))
    assert torch.equal(done.logits, expected.logits)
    assert torch.equal(done.prefix, expected.prefix)
    assert names(tmp_path) == ["log", "photo.png", *sorted([out.name, whole.name])]


class StoppedError(Exception):
    """Ends a run in the middle."""


def stop_at(place):
    def on_step(what, done, total):
        if done == place:
            raise StoppedError

    return on_step


@pytest.mark.parametrize("name", ["deit, sima_local", "deit, sima_rope", "deit, relu2", "deit, relu2_wide"])
def test_the_sums_of_every_attention_are_in_the_record(name, photo, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "SAVE_SECONDS", 0)
    out, options = tmp_path / "f.npy", {"preprocessing": HOW, "tile": TILE}
    with pytest.raises(StoppedError):
        features(build(name), photo, out, **options, on_step=stop_at(14))  # the middle of a sweep
    done = features(build(name), photo, out, **options)
    assert done.resumed_at == 14
    assert np.array_equal(read(out), features(build(name), photo, **options).features.numpy())


def test_only_the_same_run_goes_on(photo, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "SAVE_SECONDS", 0)
    out = tmp_path / "f.npy"

    def resumed_at(**changed):
        with pytest.raises(StoppedError):
            run(photo, out, on_step=stop_at(20))
        options = {"model": model(), "image": photo, "preprocessing": HOW, "tile": TILE, **changed}
        done = features(out=out, **options)
        assert_close(torch.from_numpy(read(out)).float(), features(**options).features, 1e-3)
        return done.resumed_at

    assert resumed_at() == 20
    other = model()
    with torch.no_grad():
        other.norm.bias += 1
    Image.open(photo).rotate(180).save(tmp_path / "other.png")
    for changed in (
        {"model": other},
        {"image": tmp_path / "other.png"},
        {"tile": 2},
        {"dtype": "float16"},
        {"token_ref": "train"},
        {"preprocessing": Preprocessing(32, (0, 0, 0), (1, 1, 1))},
        {"store": "memory"},
    ):
        assert resumed_at(**changed) == 0, changed


def test_a_full_disk_is_a_named_error_before_anything_is_computed(photo, tmp_path):
    steps = []
    with no_file_above(5000), pytest.raises(DiskFullError, match=r"f\.npy cannot be written: File too large"):
        run(photo, tmp_path / "f.npy", on_step=lambda *step: steps.append(step))
    assert (steps, names(tmp_path)) == ([], ["photo.png"])


@pytest.mark.parametrize("suffix", ["npy", "zarr"])
def test_a_disk_that_fills_up_in_the_middle_leaves_a_run_that_goes_on(suffix, photo, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "SAVE_SECONDS", 0)
    out, write, count = tmp_path / f"f.{suffix}", FileArray.write, [0]

    def write_some(self, tile, values):
        count[0] += 1
        if count[0] == 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, tile, values)

    monkeypatch.setattr(FileArray, "write", write_some)
    with pytest.raises(DiskFullError, match=r"No space left on device.*which goes on where this one stopped"):
        run(photo, out)
    assert names(tmp_path) == [f"{out.name}.work", "photo.png"]
    assert run(photo, out).resumed_at == 14
    assert_close(torch.from_numpy(read(out)), run(photo, None).features, 1e-6)


def test_chunks_of_zarr_that_cannot_be_written_are_a_full_disk_too(photo, tmp_path, monkeypatch):
    out = tmp_path / "f.zarr"
    with (
        no_file_above(2000),
        pytest.raises(DiskFullError, match=r"f\.zarr cannot be written: File too large"),
    ):
        features(build("deit"), photo, out, preprocessing=HOW, store="memory")
    assert names(tmp_path) == ["photo.png"]


def test_an_image_that_breaks_in_the_middle_leaves_no_output(photo, tmp_path):
    import tifffile

    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.asarray(Image.open(photo)), tile=(16, 16), compression="zlib")
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].dataoffsets[-1]
    content = bytearray(path.read_bytes())
    content[place : place + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.tif cannot be read at rows 40 to 72, columns 40 to 60"):
        run(path, tmp_path / "f.npy")
    assert "f.npy" not in names(tmp_path)


def test_two_processes_do_not_write_one_output(photo, tmp_path):
    work = tmp_path / "f.npy.work"
    work.mkdir()
    with open(work / "lock", "w") as held:
        lock(held.fileno(), wait=True)
        with pytest.raises(ValueError, match=r"another process is writing .*f\.npy"):
            run(photo, tmp_path / "f.npy")
    assert run(photo, tmp_path / "f.npy").path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "f.csv"}, r"the features go to a \.zarr or \.npy file, got .*f\.csv"),
        ({"dtype": "bfloat16"}, "unknown dtype of the features 'bfloat16'; known: float16, float32"),
        ({"tile": 0}, "tile must be 1 token or more, got 0"),
        ({"token_ref": "test"}, "token_ref must be None or 'train', got 'test'"),
        ({"store": "tape"}, "unknown store 'tape'"),
        ({"model": "deit_tiny_patch16_224"}, "model must be a module, such as sima_attn.load"),
        ({"preprocessing": None, "model": torch.nn.Identity()}, "Identity has no timm configuration"),
        ({"out": "folder.zarr"}, "exists, and `sima features` has not written it"),
        ({"out": "foreign.zarr"}, "exists, and `sima features` has not written it"),
        ({"out": "folder.npy"}, "is a folder; give the name of a file"),
    ],
)
def test_wrong_options_are_named(options, message, photo, tmp_path):
    for name in ("folder.zarr", "folder.npy"):
        (tmp_path / name).mkdir()
    zarr.create_group(tmp_path / "foreign.zarr")
    options = {"model": model(), "preprocessing": HOW, **options}
    if "out" in options:
        options["out"] = tmp_path / options["out"]
    with pytest.raises(ValueError, match=message):
        features(image=photo, **options)


@pytest.mark.parametrize("inside", ["", "0"])
def test_the_features_do_not_overwrite_the_image(inside, tmp_path):
    image = tmp_path / "slide.zarr" / inside
    if inside:
        zarr.create_group(tmp_path / "slide.zarr")
    array = zarr.create_array(image, shape=(32, 32, 3), dtype="uint8", fill_value=7)
    with pytest.raises(ValueError, match="would overwrite the image"):
        run(image, tmp_path / "slide.zarr")
    assert (array[:] == 7).all()


def test_what_is_no_image_is_named():
    with pytest.raises(TypeError, match=r"image must be a path or a NumPy array .*, got Tensor"):
        features(model(), torch.zeros(32, 32, 3), preprocessing=HOW)


@pytest.mark.parametrize("size", [(13, 9), (8, 8), (1, 700)])
def test_an_image_smaller_than_a_tile_or_a_patch_is_one(size):
    pixels = np.full((*size, 3), 128, dtype=np.uint8)
    done = features(build("deit"), pixels, preprocessing=HOW)
    assert done.shape[:2] == (-(-size[0] // 8), -(-size[1] // 8))
    assert done.features.isfinite().all()


def test_a_memory_map_is_an_array(tmp_path):
    """One that must not be written to."""
    pixels = np.random.default_rng(0).integers(0, 256, (72, 64, 3), dtype=np.uint8)
    pixels.tofile(tmp_path / "pixels")
    mapped = np.memmap(tmp_path / "pixels", dtype=np.uint8, mode="r", shape=pixels.shape)
    for tile in (TILE, 8):  # parts of rows, and whole rows, which lie in one piece
        found, expected = (features(model(), x, preprocessing=HOW, tile=tile).features for x in (mapped, pixels))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["deit", "xcit"])
def test_on_the_device_the_features_are_those_at_once(name):
    """On a GPU, if there is one, where the model at once takes the fused kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = build(name, depth=3).to(device)
    pixels = np.random.default_rng(0).integers(0, 256, (328, 240, 3), dtype=np.uint8)
    done = features(network, pixels, preprocessing=HOW, tile=11)
    assert done.store == ("device" if device == "cuda" else "disk")
    mean, std = (torch.tensor(values)[:, None, None] for values in (HOW.mean, HOW.std))
    image = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        at_once = network.forward_features(image[None].to(device))
    tokens = torch.cat([done.prefix, done.features.flatten(0, 1)])
    assert_close(tokens, at_once[0], 1e-3 if device == "cuda" else 1e-5)


def test_pictures_are_small_and_have_the_shape_of_the_image(photo, tmp_path, monkeypatch):
    from sima_attn.gigapixel import pictures

    for longest, size, sample in ((1024, (60, 72), 2**14), (20, (15, 18), 20), (5, (4, 5), 1)):
        monkeypatch.setattr(pictures, "LONGEST", longest)
        monkeypatch.setattr(pictures, "SAMPLE", sample)
        done = run(photo, None, pictures=tmp_path / "pictures")
        assert [path.name for path in done.pictures] == ["photo_q.png", "photo_k.png", "photo_pca.png"]
        assert {Image.open(path).size for path in done.pictures} == {size}


def test_the_command_prints_classes_and_writes_everything(photo, tmp_path):
    trained = tmp_path / "model"
    save(model("deit"), trained, model_kwargs=VIT | {"depth": 3})
    words = [photo, "--model", trained, "--out", tmp_path / "f.zarr", "--pictures", tmp_path / "p", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, ["features", *map(str, words), "--tile", "4"])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "60 x 72 pixels, 9 x 8 tokens of 32 channels" in result.stdout
    assert "sweeps, 0.00 GB of tokens in the store 'disk'" in result.stdout
    assert result.stdout.count("%") == 5
    assert names(tmp_path / "p") == ["photo_k.png", "photo_pca.png", "photo_q.png"]
    about = dict(zarr.open_array(tmp_path / "f.zarr").attrs)
    assert (about["patch"], about["model"]) == (8, "VisionTransformer"), json.dumps(about)


def test_a_linearized_model_runs_over_an_image_that_is_not_square(photo, tmp_path):
    settings = {key: value for key, value in VIT.items() if key != "num_classes"}
    teacher, run = build("deit", attention="softmax"), tmp_path / "student"
    few = [
        "run.threads=1",
        "data.workers=0",
        "data.cache=true",
        "report.speed=false",
        "report.trade=0",
        "report.photos=0",
    ]
    options = {"model_kwargs": settings, "attention": "sima_local", "steps": 4, "batch": 9, "overrides": few}
    linearize(teacher, class_folders(tmp_path / "photos", (3, 1)), run, **options, device="cpu", quiet=True)
    words = ["features", photo, "--model", run, "--out", tmp_path / "f.npy", "--tile", "4", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "times as many tokens" not in result.output  # sima_local has its own scale
    student = load_model(run)
    pixels = torch.from_numpy(np.array(Image.open(photo))).permute(2, 0, 1)[None] / 255.0
    mean, std = (torch.tensor(each)[:, None, None] for each in (student.preprocessing.mean, student.preprocessing.std))
    with torch.no_grad(), on_grid(student.model, (9, 8)):
        expected = student.model.forward_features((pixels - mean) / std)
    assert_close(torch.from_numpy(np.load(tmp_path / "f.npy")), expected[0, 1:].unflatten(0, (9, 8)), 1e-5)


def test_the_command_takes_half_precision_and_names_a_wrong_one(photo, tmp_path):
    words = ["features", str(photo), "--out", str(tmp_path / "f.npy"), "--device", "cpu", "--precision"]
    result = CliRunner().invoke(cli.app, [*words, "fp8"])
    assert "unknown precision 'fp8'; known: bf16, fp32" in str(result.exception)
    result = CliRunner().invoke(cli.app, [*words, "bf16", "--dtype", "float16"])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert np.load(tmp_path / "f.npy").dtype == np.float16
    assert "times as many tokens as the images in training" not in result.output


def test_an_interrupted_command_says_how_to_go_on(photo, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("sima_attn.gigapixel.features", interrupted)
    result = CliRunner().invoke(cli.app, ["features", str(photo), "--out", str(tmp_path / "f.npy"), "--device", "cpu"])
    assert result.exit_code == 130
    assert "the same command goes on from here" in result.output
