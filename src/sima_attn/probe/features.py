"""A trained model and images -> frozen features, extracted once and stored on disk under a key of weights and data.

Shapes: B batch, n images, N tokens, C channels, W width of the features.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn._errors import check_known
from sima_attn._files import atomic_write
from sima_attn._settings import check_value, from_dict
from sima_attn.data.cache import Cache
from sima_attn.data.images import READER_VERSION
from sima_attn.data.loader import Batch, BrokenImages, evaluation_batches, seed_everything
from sima_attn.data.settings import Data
from sima_attn.data.sources import Source, Subset
from sima_attn.models.loading import load_model
from sima_attn.probe.settings import Probe

BRANCHES = ("teacher", "student")
FEW_IMAGES, MOST_WORKERS = 4096, 16  # starting worker processes takes longer than decoding this many images
DTYPES = ("float16", "float32")


class Backbone(NamedTuple):
    """A model without classifier, the data settings and the evaluation of its run, and whether it is trained."""

    model: nn.Module
    data: Data
    probe: Probe
    trained: bool


class Features(NamedTuple):
    """Features [n, W], on disk or in memory, labels [n], and which images of the source they are of [n]."""

    values: np.ndarray
    labels: np.ndarray
    indices: np.ndarray
    classes: list[str]


def load_backbone(what: str | Path, *, branch: str = "teacher", seed: int = 0) -> Backbone:
    """The model of `load_model` without classifier.

    Args:
        what: Path or model name. A name gives the weights that come with the package, or random ones: the baseline
            that every training must beat.
        branch: "teacher" or, from a DINO checkpoint, "student".
        seed: Of the random weights.
    """
    check_known("branch", branch, BRANCHES)
    seed_everything(seed)
    loaded = load_model(what, branch=None if branch == "teacher" else branch, features=True)
    probe = from_dict(Probe, loaded.about.get("recipe", {}).get("probe", {}))
    check_value(probe, Probe, "probe")
    return Backbone(loaded.model, Data.of_model(loaded), probe, loaded.trained)


class LayerFeatures(nn.Module):
    """Images -> what the linear classifier of the paper reads [B, W], from the last layers of a model.

    - XCiT: the class tokens of the last two class-attention layers and the averages over the tokens of the last two
      self-attention layers, 4 C channels.
    - Models with a class token among the others (ViT, CvT): the class tokens of the last four layers and the average
      over the tokens of the last one, 5 C.
    - Models without: the averages of the last four layers, 4 C.

    Args:
        model: Without classifier.
        layers: Another number of layers.
        norm: Pass the tokens through the model's last norm, as DINO does with a ViT's; the paper does not say.
    """

    def __init__(self, model: nn.Module, layers: int | None = None, norm: bool = True) -> None:
        super().__init__()
        self.model, self.norm = model, norm
        inner: Any = model
        last_norms = [getattr(model, name, None) if norm else None for name in ("norm", "fc_norm")]
        # timm's ViTs that average have their last norm after pooling; elsewhere one of the two is the identity.
        self.token_norm, self.pooled_norm = (last or nn.Identity() for last in last_norms)
        self.class_blocks = list(getattr(inner, "cls_attn_blocks", []))
        stages = getattr(inner, "stages", None)
        blocks = getattr(stages[-1] if stages else inner, "blocks", None)  # CvT's class token is in its last stage
        if not blocks:
            raise ValueError(f"{type(model).__name__} has no list of blocks to read layers from; use --features output")
        self.blocks = list(blocks)
        self.prefix = 0 if self.class_blocks else getattr(inner, "num_prefix_tokens", 0)
        self.layers = layers if layers is not None else (2 if self.class_blocks else min(4, len(self.blocks)))
        most = min(len(self.blocks), len(self.class_blocks) or len(self.blocks))
        if not 1 <= self.layers <= most:
            raise ValueError(f"{self.layers} layers requested, but {type(model).__name__} has {most}")

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, S, S] -> features [B, W]."""
        wanted = self.blocks[-self.layers :] + self.class_blocks[-self.layers :]
        seen: dict[nn.Module, Tensor] = {}

        def keep(block: nn.Module, inputs: Any, tokens: Tensor) -> None:
            if not isinstance(tokens, Tensor) or tokens.dim() != 3:
                raise ValueError(f"the blocks of {type(self.model).__name__} return no tokens; use --features output")
            seen[block] = tokens  # [B, N, C]

        hooks = [block.register_forward_hook(keep) for block in wanted]
        try:
            self.model(images)
        finally:
            for hook in hooks:
                hook.remove()
        tokens = [self.token_norm(seen[block]) for block in wanted]
        if self.class_blocks:
            parts = [x.mean(1) for x in tokens[: self.layers]] + [x[:, 0] for x in tokens[self.layers :]]
        elif self.prefix:
            parts = [x[:, 0] for x in tokens] + [tokens[-1][:, self.prefix :].mean(1)]
        else:
            parts = [x.mean(1) for x in tokens]
        return torch.cat([self.pooled_norm(part) for part in parts], dim=1)  # [B, W]


@torch.no_grad()
def _rows(model: nn.Module, batches: Iterator[Batch], device: str, dtype: str) -> Iterator[np.ndarray]:
    """The features of each batch [B, W]; raises where they are not finite."""
    model = model.to(device).eval()
    for images, _ in batches:
        features = model(images).float()
        if features.dim() != 2:
            raise ValueError(
                f"the model returns features of shape {tuple(features.shape)}; one vector per image is needed"
            )
        with np.errstate(over="ignore"):  # reported below
            rows = features.cpu().numpy().astype(dtype)
        if not np.isfinite(rows).all():
            remedy = "use --dtype float32" if features.isfinite().all() else "the weights or the images are not"
            raise ValueError(f"features of {type(model).__name__} are not finite in {dtype}; {remedy}")
        yield rows


def features_of(
    model: nn.Module, cache: Cache, device: str, on_step: Callable[[int, int], None], batch: int = 512
) -> Features:
    """Features of decoded images, in memory and in half precision; nothing is written to disk."""
    indices, parts = np.flatnonzero(cache.good), []
    for rows in _rows(model, cache.evaluation_batches(batch), device, "float16"):
        parts.append(rows)
        on_step(sum(map(len, parts)), len(indices))
    return Features(np.concatenate(parts), cache.source.labels[indices], indices, cache.source.classes)


def extract(
    model: nn.Module,
    source: Source,
    data: Data,
    folder: Path,
    *,
    about: str = "",
    dtype: str = "float16",
    batch: int = 256,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Features of all readable images, loaded from the folder if they were extracted before.

    Args:
        model: Images -> features [B, W].
        folder: Where features are kept, in files named by their key.
        about: Further words of the key, for what the weights do not tell.
    """
    check_known("dtype of features", dtype, DTYPES)
    key = key_of(model, source, data, f"{about} {dtype}")
    kept, kept_indices = folder / f"{key}.npy", folder / f"{key}-indices.npy"
    if not kept.is_file():
        broken, done = BrokenImages(source, say), 0
        batches = evaluation_batches(source, data, batch, device=torch.device(device), broken=broken)
        # Written, not mapped: on a full disk writing raises an error, a write to mapped memory kills the process.
        with atomic_write(kept) as temporary, open(temporary, "wb") as file:
            for rows in _rows(model, batches, device, dtype):
                if not done:
                    _write_header(file, rows.dtype, len(source), rows.shape[1])
                file.write(rows.tobytes())
                done += len(rows)
                on_step(done + len(broken.found), len(source))
            if not done:
                raise ValueError(f"none of the {len(source)} images can be read")
            file.seek(0)
            _write_header(file, rows.dtype, done, rows.shape[1])  # as long as the first: numpy pads the number of rows
            with atomic_write(kept_indices) as other:
                np.save(other, np.setdiff1d(np.arange(len(source)), sorted(broken.found)))
    indices = np.load(kept_indices)
    return Features(np.load(kept, mmap_mode="r"), source.labels[indices], indices, source.classes)


def _write_header(file: IO[bytes], dtype: np.dtype, images: int, width: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (images, width)}
    np.lib.format.write_array_header_1_0(file, header)


def feature_folder(model: str | Path | None) -> Path:
    """Where the features of a model are kept: in the folder of its run, or in runs/."""
    path = Path(model) if model is not None else Path("runs")
    where = path if path.is_dir() else path.parent if path.is_file() else Path("runs")
    return (where.parent if where.name == "checkpoints" else where) / "features"


def with_workers(data: Data, images: int) -> Data:
    """The settings with worker processes for many images: recipes with a device cache have none."""
    if data.workers or images < FEW_IMAGES:
        return data
    return replace(data, workers=min(MOST_WORKERS, os.cpu_count() or 1))


def key_of(model: nn.Module, source: Source, data: Data, about: str = "") -> str:
    """The key of the features of these weights on these images.

    It changes with the weights, with the images and with the way they are read.
    """
    digest = hashlib.sha256()
    digest.update(repr(model).encode())  # the attention, its options and all sizes are in it
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    # Settings that change the features and are neither in the repr nor in the weights.
    pools = [module.global_pool for module in model.modules() if hasattr(module, "global_pool")]
    layers = [getattr(model, name, None) for name in ("layers", "norm")] if isinstance(model, LayerFeatures) else []
    digest.update(repr((pools, layers, data.preprocessing, about)).encode())
    digest.update(f"reader {READER_VERSION}".encode())
    digest.update(source_fingerprint(source))
    return digest.hexdigest()[:24]


def source_fingerprint(source: Source) -> bytes:
    """Bytes that change with the images of a source: their files' names, sizes and times, or the pixels themselves."""
    digest = hashlib.sha256(np.ascontiguousarray(source.labels).tobytes())
    if isinstance(source, Subset):
        digest.update(source_fingerprint(source.source) + np.ascontiguousarray(source.indices).tobytes())
    for file in getattr(source, "files", []):
        facts = Path(file).stat()
        digest.update(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode())
    if hasattr(source, "images"):
        digest.update(np.ascontiguousarray(source.images).tobytes())
    return digest.digest()


def evenly(n: int, count: int) -> list[int]:
    """`count` evenly spaced numbers below n, or all of them."""
    return sorted(set(np.linspace(0, n - 1, min(n, count)).round().astype(int).tolist()))


def check_labels(labels: np.ndarray | Tensor, images: int, classes: int, what: str) -> Tensor:
    """Labels [n] as a tensor; raise unless each image has one, and it has a class."""
    tensor = torch.as_tensor(labels)
    if tensor.shape != (images,) or ((tensor < 0) | (tensor >= classes)).any():
        raise ValueError(
            f"the {images} {what} images need one label each, from 0 to {classes - 1}; got labels of shape "
            f"{tuple(tensor.shape)} from {tensor.min()} to {tensor.max()}"
        )
    return tensor.long()
