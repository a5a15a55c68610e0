"""The image processor in a folder of transformers <-> `Preprocessing`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_INCEPTION_MEAN,
    IMAGENET_INCEPTION_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from sima_attn._files import atomic_write
from sima_attn.models.preprocessing import Preprocessing

PROCESSOR = "preprocessor_config.json"  # in a folder of save_pretrained
WHOLE_PROCESSOR = "processor_config.json"  # of a model for images and texts; has the image processor as an entry
# Family -> mean and std that its models were published with; ImageNet's for the others.
NORMALIZATION = {
    "clip": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "siglip": (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD),
}
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as in PIL


def preprocessing_of(model: Any, folder: Path | None = None) -> Preprocessing:
    """How a photo becomes the input of a model: from the image processor in a folder, or else from its configuration.

    Without a folder it is the one that the model was loaded from. Without a processor the size is that of the
    configuration, mean and std are those of CLIP and SigLIP for these families, and ImageNet's for the others.
    """
    config = getattr(model.config, "vision_config", model.config)
    own = getattr(config, "image_size", 224)
    size = own[0] if isinstance(own, list | tuple) else own
    family = next((name for name in NORMALIZATION if config.model_type.startswith(name)), None)
    mean, std = NORMALIZATION.get(family or "", (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    folder = folder or _folder_of(model)
    entries = None if folder is None else _read_entries(folder)
    if entries is None:
        return Preprocessing(size, mean, std)
    try:
        return _from_entries({"image_mean": mean, "image_std": std, **entries}, size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the image processor in {folder} cannot be used: {error}") from error


def copy_processor(model: Any, folder: Path) -> None:
    """Copy the image processor of the folder that a model was loaded from, if there is one, to another folder."""
    source = _folder_of(model)
    for name in (PROCESSOR, WHOLE_PROCESSOR):
        if source is not None and (source / name).is_file() and not (folder / name).exists():
            with atomic_write(folder / name) as temporary:
                temporary.write_bytes((source / name).read_bytes())


def _folder_of(model: Any) -> Path | None:
    """The folder that a model was loaded from, which `from_pretrained` leaves in it; None for other models."""
    return Path(model.name_or_path) if model.name_or_path and Path(model.name_or_path).is_dir() else None


def _from_entries(entries: Mapping[str, Any], own_size: int) -> Preprocessing:
    """From the entries of an image processor; `own_size` is that of the model, where it does not resize."""
    entries = _without_crop_pct(entries)
    given = entries.get("size") if entries.get("do_resize", True) else None
    resized = _side(given) or own_size
    size = (_side(entries.get("crop_size")) or resized) if entries.get("do_center_crop") else resized
    crop_ratio = min(1.0, size / resized)
    if int(size / crop_ratio) < resized:  # by rounding
        crop_ratio = math.nextafter(crop_ratio, 0)
    # (x * factor - mean) / std of bytes x is ours, (x / 255 - mean') / std', with both divided by 255 * factor.
    scale = 255 * (entries.get("rescale_factor", 1 / 255) if entries.get("do_rescale", True) else 1)
    normalize = entries.get("do_normalize", True)
    mean, std = (entries["image_mean"], entries["image_std"]) if normalize else ([0.0] * 3, [1.0] * 3)
    resample = entries.get("resample", 3)
    if resample not in RESAMPLING:
        raise ValueError(f"resample must be 2 (bilinear) or 3 (bicubic), got {resample!r}")
    return Preprocessing(
        size,
        tuple(value / scale for value in mean),  # type: ignore[arg-type]  # Preprocessing checks the number
        tuple(value / scale for value in std),  # type: ignore[arg-type]
        crop_ratio,
        RESAMPLING[resample],
        "squash" if _resizes_both_sides(given, entries) else "center",
    )


def _without_crop_pct(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of ConvNeXt's processor, which CvT uses, as those of others.

    Below 384 pixels it resizes the shorter side to size / crop_pct and crops, from there on it resizes both sides.
    """
    share, size = entries.get("crop_pct"), _side(entries.get("size"))
    if not share or size is None:
        return entries
    if size >= 384:
        return {**entries, "size": {"height": size, "width": size}}
    return {**entries, "size": {"shortest_edge": int(size / share)}, "crop_size": size, "do_center_crop": True}


def _resizes_both_sides(size: Any, entries: Mapping[str, Any]) -> bool:
    """Whether an image processor disregards the aspect ratio: {"height", "width"}, or one number and no crop."""
    return "height" in size if isinstance(size, Mapping) else size is not None and not entries.get("do_center_crop")


def write_processor(preprocessing: Preprocessing, folder: Path) -> None:
    """Write the image processor that does the same as our preprocessing."""
    side = {"height": preprocessing.size, "width": preprocessing.size}
    resized = preprocessing.resized
    squash = preprocessing.crop_mode == "squash"
    entries = {
        "image_processor_type": "CLIPImageProcessor",  # the one that resizes and crops, as we do
        "do_resize": True,
        "size": {"height": resized, "width": resized} if squash else {"shortest_edge": resized},
        "resample": next(number for number, name in RESAMPLING.items() if name == preprocessing.interpolation),
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    with atomic_write(folder / PROCESSOR) as temporary:
        temporary.write_text(json.dumps(entries, indent=2))


def _read_entries(folder: Path) -> dict[str, Any] | None:
    """The entries of the image processor in a folder; None without one."""
    for name, entry in ((PROCESSOR, None), (WHOLE_PROCESSOR, "image_processor")):
        try:
            entries = json.loads((folder / name).read_text())
            entries = entries if entry is None else entries[entry]
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / name} does not describe an image processor: {error}") from error
        if isinstance(entries, dict):
            return entries
    return None


def _side(size: Any) -> int | None:
    """The side in pixels, however an image processor writes it."""
    if isinstance(size, Mapping):
        if size.get("height") != size.get("width"):
            raise ValueError(f"images must be square, got {dict(size)}")
        size = size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) else None
