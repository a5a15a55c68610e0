"""A model run tile by tile is the model run at once; its memory does not grow with the image."""

import math

import numpy as np
import pytest
import torch
from tiled_models import MODELS, build, deit, strong, xcit
from torch.utils._python_dispatch import TorchDispatchMode

from closeness import assert_close
from sima_attn.explain import read_attention
from sima_attn.gigapixel import api, features, pictures
from sima_attn.gigapixel.network import network_of
from sima_attn.gigapixel.positions import FourierPositions, LearnedPositions
from sima_attn.gigapixel.stores import FileArray, MemoryArray, choose_store
from sima_attn.gigapixel.sweeps import Sweeps
from sima_attn.gigapixel.tiles import Tile, tiles_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.baselines.softmax import SoftmaxAttention
from sima_attn.nn.grid import on_grid
from sima_attn.nn.token_ref import trained_at

HOW = Preprocessing(32, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def image(height, width):
    return torch.randn(1, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def photo(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def sweeps_of(model, pixels, side, make=MemoryArray):
    network = network_of(model)
    shape = (*network.grid(*pixels.shape[2:]), network.width)
    first, second, result = (make(shape, network.dtype) for _ in range(3))
    return Sweeps(
        network, pixels.shape[2:], lambda tile: pixels[:, :, *tile.slices], side, (first, second), result
    ), result


def run(model, pixels, side):
    """All final tokens [1, P + N, C], and the logits."""
    with torch.no_grad():
        sweeps, result = sweeps_of(model, pixels, side)
        prefix, mean = sweeps.run()
        tokens = torch.cat([prefix, result.values.flatten(0, 1)[None]], dim=1)
        return tokens, sweeps.network.logits(prefix, mean)


# Height and width in pixels, and the side of a tile in tokens: one tile, tiles that divide the grid, and that do not.
TILINGS = [(32, 32, 9), (32, 32, 1), (64, 64, 3), (48, 80, 4), (50, 77, 2), (13, 61, 3)]


@pytest.mark.parametrize(("height", "width", "side"), TILINGS)
@pytest.mark.parametrize("name", MODELS)
def test_tile_by_tile_is_at_once(name, height, width, side):
    if "local mixer" in name:
        width = height  # alone it knows only square grids
    model, pixels = build(name).double(), image(height, width)
    tokens, logits = run(model, pixels, side)
    with torch.no_grad(), on_grid(model, network_of(model).grid(height, width)):
        expected = model.forward_features(pixels)
        # timm resamples position embeddings in float32, whatever the dtype of the model.
        resampled = hasattr(model, "dynamic_img_size") and (height, width) != model.patch_embed.img_size
        assert_close(tokens, expected, 1e-6 if resampled else 1e-12)
        assert_close(logits, model(pixels)[0], 1e-6 if resampled else 1e-12)


@pytest.mark.parametrize(
    "options", [{"num_classes": 0}, {"global_pool": "max"}, {"global_pool": "avg", "pool_include_prefix": True}]
)
def test_without_classes_or_with_another_pooling_there_are_features_and_no_scores(options):
    model, pixels = strong(deit(**options)), image(32, 48).float()
    tokens, logits = run(model, pixels, 2)
    assert logits is None
    with torch.no_grad():
        assert_close(tokens, model.forward_features(pixels), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["deit", "xcit", "deit, sima_local", "deit, sima_rope", "deit, relu2", "deit, relu2_wide"]
)
def test_in_lower_precision_the_error_is_that_of_the_model_at_once(name, dtype):
    model, pixels = build(name), image(64, 64)
    with torch.no_grad():
        true = build(name).double().forward_features(pixels)
        at_once = model.to(dtype).forward_features(pixels.to(dtype)).double()
    tokens, _ = run(model, pixels.to(dtype), 3)
    error, allowed = (tokens.double() - true).norm(), (at_once - true).norm()
    assert error <= 2 * allowed


def test_a_model_of_one_size_runs_at_others_as_with_dynamic_img_size():
    fixed, dynamic = (strong(deit(dynamic_img_size=d, dynamic_img_pad=d)) for d in (False, True))
    dynamic.load_state_dict(fixed.state_dict())
    tokens, _ = run(fixed, image(40, 72).float(), 2)
    with torch.no_grad():
        assert_close(tokens, dynamic.forward_features(image(40, 72).float()), 1e-5)


@pytest.mark.parametrize("grid", [(4, 4), (3, 9), (7, 2), (1, 1)])
def test_positions_of_tiles_are_those_of_the_whole_grid(grid):
    from timm.layers import resample_abs_pos_embed

    trained = torch.randn(1, 16, 6)
    encoding = strong(xcit()).pos_embed
    whole = {
        LearnedPositions(trained[0].unflatten(0, (4, 4)), grid): resample_abs_pos_embed(
            trained, list(grid), [4, 4], num_prefix_tokens=0
        )[0].unflatten(0, grid),
        FourierPositions(encoding, grid): encoding(1, *grid)[0].movedim(0, 2),
    }
    for positions, expected in whole.items():
        for tile in tiles_of(grid, 2):
            assert_close(positions.of(tile), expected[tile.slices], 1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns, storage included."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("name", ["deit", "xcit"])
def test_memory_is_bounded_by_the_tile_not_by_the_image(name, tmp_path):
    model, side, largest = build(name), 8, []
    for rows, columns in [(24, 24), (24, 96), (96, 24), (64, 64)]:
        shape = (rows, columns, 32)
        arrays = [FileArray(tmp_path / f"{rows}-{columns}-{i}", shape, torch.float32) for i in range(3)]
        with LargestTensor() as counted, torch.no_grad():
            size = (8 * rows, 8 * columns)
            Sweeps(
                network_of(model), size, lambda tile: torch.rand(1, 3, *tile.shape), side, arrays[:2], arrays[2]
            ).run()
        for array in arrays:
            array.close()
        largest.append(counted.largest)
    assert len(set(largest)) == 1
    assert largest[0] < 24 * 96 * 32


def test_the_memory_of_a_model_that_runs_at_once_is_seen_to_grow():
    largest = []
    for side in (192, 384):
        with LargestTensor() as counted, torch.no_grad():
            build("deit")(image(side, side).float())
        largest.append(counted.largest)
    assert largest[1] == 4 * largest[0]


def test_each_sweep_reads_and_writes_each_tile_once():
    calls = []

    class Counted(MemoryArray):
        def read(self, tile):
            calls.append(("read", tile))
            return super().read(tile)

        def write(self, tile, values):
            calls.append(("write", tile))
            super().write(tile, values)

    with torch.no_grad():
        sweeps, _ = sweeps_of(build("deit"), image(32, 64).float(), 2, Counted)
        sweeps.run()
    tiles = list(tiles_of((4, 8), 2))
    assert calls[:8] == [("write", tile) for tile in tiles]
    assert calls[8:] == 2 * [(kind, tile) for tile in tiles for kind in ("read", "write")]


@pytest.mark.parametrize(
    "name", ["deit", "xcit", "deit, token_ref", "xcit, sima_local", "deit, sima_rope", "deit, relu2"]
)
def test_scores_of_queries_and_keys_are_those_of_the_heat_maps(name):
    model, pixels = build(name), image(32, 64).float()
    with torch.no_grad():
        sweeps, _ = sweeps_of(model, pixels, 3)
        sweeps.run()
        scores = torch.from_numpy(pictures.shrunken(lambda tile: pictures._scores(sweeps, tile), sweeps.grid, 3))
    with on_grid(model, sweeps.grid):
        layer = read_attention(model, pixels).layers[-1]
    for i, part in enumerate(("q", "k")):
        assert_close(scores[:, :, i], layer.scores(part)[0], 1e-5)


def test_a_photo_enters_as_through_the_transform_of_evaluation():
    from PIL import Image

    from sima_attn.data.loader import evaluation_transform

    model, pixels = build("deit"), photo(32, 32)
    with torch.no_grad():
        expected = model(evaluation_transform(HOW)(Image.fromarray(pixels))[None])[0]
    assert_close(features(model, pixels, preprocessing=HOW).logits, expected, 1e-5)


def test_token_ref_train_is_the_model_as_if_it_were_trained_at_that_size():
    model, pixels = build("xcit"), photo(64, 48)
    plain = features(model, pixels, preprocessing=HOW).features
    scaled = features(model, pixels, preprocessing=HOW, token_ref="train").features
    normalized = (torch.from_numpy(pixels).permute(2, 0, 1) / 255.0 - torch.tensor(HOW.mean)[:, None, None]) / (
        torch.tensor(HOW.std)[:, None, None]
    )
    with torch.no_grad(), trained_at(model, HOW.size):
        expected = model.forward_features(normalized[None])[0, 1:].unflatten(0, (8, 6))
    assert_close(scaled, expected, 1e-5)
    assert (plain - scaled).abs().max() > 1e-3
    assert all(getattr(module, "token_ref", None) is None for module in model.modules())


class MixesTokens(torch.nn.Module):
    """No MLP: its output depends on all tokens."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def with_foreign_mlp():
    model = build("deit")
    model.blocks[1].mlp = MixesTokens()
    return model


def with_one_softmax():
    model = build("deit")
    model.blocks[1].attn = SoftmaxAttention(32, 2)
    return model


REFUSED = {
    "softmax": (lambda: deit(attention="softmax"), r"blocks\.0\.attn is SoftmaxAttention.*sima linearize"),
    "xca": (lambda: xcit(attention="xca"), r"blocks\.0\.attn is XCAttention"),
    "elu": (
        lambda: deit(attention="elu"),
        r"blocks\.0\.attn is EluAttention.*sima, sima_local, sima_rope, relu2, relu2_wide",
    ),
    "one block": (with_one_softmax, r"blocks\.1\.attn is SoftmaxAttention"),
    "l2": (lambda: deit(attention_options={"norm": "l2"}), r"blocks\.0\.attn has norm='l2'"),
    "l2 with a convolution": (
        lambda: deit(attention="sima_local", attention_options={"norm": "l2"}),
        r"blocks\.0\.attn has norm='l2'",
    ),
    "class attention": (
        lambda: xcit(class_attention="softmax"),
        r"cls_attn_blocks\.0\.attn is ClassAttn.*class_attention='sima'",
    ),
    "another family": (lambda: torch.nn.Linear(2, 2), "Linear cannot run tile by tile"),
    "foreign mlp": (with_foreign_mlp, "gives other features tile by tile than at once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_tile_by_tile_is_refused(name, tmp_path):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        features(make().eval(), photo(32, 32), tmp_path / "out.npy", preprocessing=HOW)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["deit", "xcit", "mini vit, local mixer"])
def test_every_model_passes_the_check_before_a_run(name):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    with torch.no_grad():
        api.check_network(network_of(model))
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tiles_cover_the_grid_once():
    count = np.zeros((7, 11), dtype=int)
    for tile in tiles_of((7, 11), 3):
        count[tile.slices] += 1
        grown = tile.grown(2, (7, 11))
        assert np.shape(count[grown.slices][tile.inside(grown)]) == tile.shape
    assert (count == 1).all()


def test_a_file_array_is_read_as_it_was_written(tmp_path):
    values = torch.randn(5, 7, 3).bfloat16()
    array = FileArray(tmp_path / "a", (5, 7, 3), torch.bfloat16, offset=10)
    for tile in tiles_of((5, 7), 2):
        array.write(tile, values[tile.slices])
    for tile in (Tile(0, 5, 0, 7), Tile(1, 3, 2, 6), Tile(4, 5, 0, 7)):
        assert torch.equal(array.read(tile), values[tile.slices])
    array.close()
    assert (tmp_path / "a").stat().st_size == 10 + math.prod(values.shape) * 2


def test_stores_that_do_not_fit_are_refused(tmp_path):
    cpu = torch.device("cpu")
    assert choose_store("auto", 10, cpu, tmp_path) == choose_store("disk", 10, cpu, tmp_path) == "disk"
    assert choose_store("memory", 10, cpu, tmp_path) == "memory"
    with pytest.raises(ValueError, match="store 'device' is the memory of an accelerator"):
        choose_store("device", 10, cpu, tmp_path)
    for store in ("memory", "disk"):
        with pytest.raises((ValueError, OSError), match=r"need 1000000000\.0 GB"):
            choose_store(store, 10**18, cpu, tmp_path)
    with pytest.raises(ValueError, match=r"unknown store 'dsk'.*did you mean 'disk'"):
        choose_store("dsk", 10, cpu, tmp_path)
