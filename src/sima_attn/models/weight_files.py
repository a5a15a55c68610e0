"""Weight files, checkpoints and run folders -> tensors, and the metadata that a run writes beside them.

Anyone may have written a file: only tensors and plain values are read, never code.
"""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sima_attn.models.sharded_files import check_whole, is_sharded, read_sharded

StateDict = dict[str, Tensor]
WRAPPERS = ("model", "state_dict")
RECIPE, WEIGHTS, CHECKPOINTS = "recipe.yaml", "weights.safetensors", "checkpoints"  # in the folder of a run
ABOUT = "about"  # key of the metadata in a .safetensors file and in a checkpoint
SEAL = "sima_attn.converted_attentions"  # a tensor in a file of `save`, which no model has
_CHECKPOINT = re.compile(r"step-(\d+)(\.pt)?")  # a file, or a folder of several processes


def weights_of_run(folder: Path, *, branch: str | None = None) -> Path:
    """The weights of a run; its newest checkpoint while it is running, and for a branch. A checkpoint is its own."""
    if is_sharded(folder):
        return folder
    weights = folder / WEIGHTS
    if weights.is_file() and branch is None:
        return weights
    if found := newest_readable(folder / CHECKPOINTS):
        return found
    if weights.is_file():
        raise FileNotFoundError(
            f"the run in {folder} has no checkpoints, and only they hold the {branch} weights; its last weights are "
            "there: omit --ema (with `sima ship`: --no-ema) or --branch"
        )
    if not (folder / RECIPE).is_file():
        raise FileNotFoundError(f"there is no run in {folder}: {RECIPE} is missing")
    raise FileNotFoundError(f"the run in {folder} has no checkpoint yet")


def checkpoints(folder: Path) -> list[Path]:
    """Paths of all that is named as a checkpoint, file or folder, the newest first."""
    found = [path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(_CHECKPOINT.fullmatch(path.name)[1]))  # type: ignore[index]


def read_weights(path: Path, branch: str | None = None) -> tuple[dict[str, Any], StateDict]:
    """The metadata and the weights of a file of a run: weights (.safetensors) or a checkpoint.

    A branch is "ema", the average weights of `sima train`, or "student" of `sima dino`, whose weights are the teacher.
    """
    if path.suffix == ".safetensors":
        if branch is not None:
            raise ValueError(f"{path} holds one set of weights; the {branch} weights are in the run's checkpoints")
        return read_about(path), read_state_dict(path, for_its_model=True)
    state = load_checkpoint(path)
    about: Any = state.get(ABOUT) if isinstance(state, dict) else None
    if not isinstance(about, dict):
        return {}, {}  # a file of another origin, as in `read_about`
    if about.get("task") == "dino":
        parts, prefix = {None: (state.get("task") or {}).get("teacher"), "student": state.get("model")}, "backbone."
    else:
        parts, prefix = {None: state.get("model"), "ema": state.get("ema")}, ""
    found: Any = parts.get(branch)
    if not _is_state_dict(found):
        hint = {"ema": "; set run.ema to keep them", "student": "; only a run of `sima dino` has a student"}
        raise ValueError(f"the checkpoint {path} holds no {branch or 'trained'} weights{hint.get(branch or '', '')}")
    return about, {name.removeprefix(prefix): w for name, w in found.items() if name.startswith(prefix)}


def not_ours(path: Path) -> ValueError:
    """The error for a file without the metadata of a run."""
    return ValueError(
        f"{path} was not written by `sima train` or `sima dino`: it does not say which model it is; give its name too, "
        "as NAME=FILE"
    )


def read_about(path: Path) -> dict[str, Any]:
    """The metadata that a run wrote into a .safetensors file or a checkpoint; empty for a file of another origin."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file() and not is_sharded(path):
        raise FileNotFoundError(f"there is no weight file {path}")
    if path.suffix != ".safetensors":
        state = load_checkpoint(path)
        found: Any = state.get(ABOUT) if isinstance(state, dict) else None
        return found if isinstance(found, dict) else {}
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as weights (.safetensors): {error}") from error
    except (json.JSONDecodeError, RecursionError):
        raise not_ours(path) from None
    if not isinstance(about, dict):
        raise not_ours(path)
    return about


def read_recipe_values(path: Path) -> dict[str, Any]:
    """The settings in the recipe file of a run, as plain values."""
    import yaml

    try:
        text = path.read_text()
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):  # they can expand to gigabytes
            raise ValueError(f"{path} has YAML aliases (*name), which are not allowed; write them out")
        values = yaml.safe_load(text)["recipe"]
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise TypeError("`recipe` is no table of settings")
        return values
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged and cannot be read: {error}") from error


def newest_readable(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """Path of the newest readable checkpoint, None if there is no checkpoint; reports those that are skipped."""
    found = checkpoints(folder)
    for path in found:
        try:
            check_readable(path)
        except ValueError as error:
            say(f"{error}; using the previous one")
        else:
            return path
    if found:
        raise ValueError(f"none of the {len(found)} checkpoints in {folder} can be read; start a new run")
    return None


def check_readable(path: Path) -> None:
    """Raise unless `path` is a checkpoint with correct checksums: a file, or the folder of a sharded run."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if is_sharded(path):
        check_whole(path)
        return
    if path.suffix == ".onnx":
        raise ValueError(
            f"{path} is an ONNX file, which `sima audit`, `sima quantize` and `sima serve --onnx` take; here, give the "
            "model that was exported"
        )
    if not path.is_file():  # opening a pipe would block
        kind = "a folder" if path.is_dir() else "a link to a missing file" if path.is_symlink() else "a pipe or device"
        raise ValueError(f"the checkpoint {path} is {kind}, not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()  # torch does not verify the checksums it writes
    except (OSError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"the checkpoint {path} is damaged, or not a checkpoint: {error}") from error
    if wrong is not None:
        raise ValueError(f"the checkpoint {path} is damaged: the checksum of {wrong} is wrong")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; of a folder without that of the optimizer."""
    if is_sharded(path):
        return read_sharded(path)
    check_readable(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"the checkpoint {path} is damaged, or not a checkpoint: {error}") from error


def read_state_dict(path: Path, *, for_its_model: bool = False) -> StateDict:
    """The tensors of a .safetensors file, or of a torch file, alone or wrapped.

    A file that says that its attentions were converted is refused unless it is for the model that it describes: a
    softmax model would take the weights, and compute something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no weight file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise anything on a file that is not theirs
        raise ValueError(
            f"{path} cannot be read as weights: give a .safetensors file, or a .pth that holds tensors alone"
        ) from error
    if not for_its_model and _has_converted_attentions(path, content):
        raise ValueError(
            f"the attentions of the model in {path} were converted, and a model created by its name has others; "
            f"give the file alone, without a name: it says which model it is (in Python sima_attn.load({str(path)!r}))"
        )
    if isinstance(content, dict):
        content.pop(SEAL, None)
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not _is_state_dict(content):
        raise ValueError(f"{path} holds no state dict, alone or under {' or '.join(map(repr, WRAPPERS))}")
    return {key.removeprefix("module."): value for key, value in content.items()}


def _has_converted_attentions(path: Path, content: Any) -> bool:
    """Whether the metadata of a file list converted attentions, or name an attention for a model of timm."""
    if not isinstance(content, dict):
        return False
    about = read_about(path) if path.suffix == ".safetensors" else content.get(ABOUT)
    recipe = about.get("recipe") if isinstance(about, dict) else None
    model = recipe.get("model") if isinstance(recipe, dict) else None
    if not isinstance(about, dict) or not isinstance(model, dict):
        return SEAL in content
    is_ours = str(model.get("name")).startswith("sima_")
    return SEAL in content or bool(about.get("converted")) or (bool(model.get("attention")) and not is_ours)


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())


def check_fits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, hint: str = "") -> None:
    """Raise unless weights have the names and shapes of a model's; the message is `what`, the differences, `hint`."""
    differences = {
        "missing in the file": sorted(wanted.keys() - given.keys()),
        "not in the model": sorted(given.keys() - wanted.keys()),
        "of another shape": [
            f"{key} {tuple(given[key].shape)}, the model has {tuple(wanted[key].shape)}"
            for key in sorted(given.keys() & wanted.keys())
            if given[key].shape != wanted[key].shape
        ],
    }
    if any(differences.values()):
        listed = "; ".join(f"{kind}: {_first_keys(keys)}" for kind, keys in differences.items() if keys)
        raise ValueError(f"{what}. {listed}{hint}")


def _first_keys(keys: list[str], count: int = 5) -> str:
    return ", ".join(keys[:count]) + (f" and {len(keys) - count} more" if len(keys) > count else "")
