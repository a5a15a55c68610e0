"""The folder of a run, and when a run may be started or resumed in it.

recipe.yaml          the recipe with all overrides, versions and commit
checkpoints/         step-*.pt, the last two; folders step-* of a sharded run
.torchrun            the job of torchrun that last trained the run
batch.png            the first training batch as the model gets it
train.csv, eval.csv  one row per run.log_steps steps, one row per evaluation; tensorboard/ the same
learning_curve.png, weights.safetensors    written at the end
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sima_attn._files import atomic_write
from sima_attn._settings import differences, to_dict
from sima_attn._version import __version__
from sima_attn.models.weight_files import CHECKPOINTS, RECIPE, WEIGHTS, checkpoints, read_recipe_values
from sima_attn.train.recipe_files import recipe_from_file
from sima_attn.train.recipes import Recipe

# Command -> a setting that its recipes alone have. The others are recipes of `sima train`.
SETTINGS_OF = {"dino": "distill", "finetune": "finetune", "linearize": "transfer", "detect train": "model.proposals"}


class RunFolder:
    """Paths of a run, and what may be done in its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_file, self.checkpoints, self.weights = path / RECIPE, path / CHECKPOINTS, path / WEIGHTS
        self.curve, self.batch_picture = path / "learning_curve.png", path / "batch.png"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here; the system releases the lock when this process ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / ".lock"
        with open(path, "w") as file:
            try:
                # Not flock: worker processes would inherit the lock, and may outlive a killed run for a while.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"another process is training in {self.path}; wait for it, or choose another folder with --out"
                ) from None
            except OSError:  # network file systems may not support locks
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def check(self, recipe: Any, *, resume: bool) -> None:
        """Raise unless the folder is free for a new run, or holds the run to resume."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file or a broken link, not a folder; choose another --out")
        if not resume:
            for name in (RECIPE, WEIGHTS, CHECKPOINTS, "train.csv", "eval.csv"):
                if os.path.lexists(self.path / name):
                    raise ValueError(f"{self.path} already holds a run ({name}): add --resume, or choose another --out")
            return
        refuse_changes(f"the run in {self.path}", self.read_recipe(type(recipe)), recipe)
        left = [file.name for file in (self.weights, self.path / "train.csv") if file.exists()]
        if left and not checkpoints(self.checkpoints):
            what = " and ".join(left)
            raise ValueError(f"{self.path} has {what}, but no checkpoint to resume from; choose another --out")

    def check_finished(self, recipe: Any) -> None:
        """Raise unless the finished run here has this recipe; settings of `run` other than the seed may differ."""
        saved = self.read_recipe(type(recipe))
        if Path(saved.data.path).resolve() != Path(recipe.data.path).resolve():
            raise ValueError(
                f"the run in {self.path} was trained on the images in {saved.data.path}, not on those in "
                f"{recipe.data.path}; choose another --out"
            )
        asked = replace(recipe, run=replace(saved.run, seed=recipe.run.seed))
        refuse_changes(f"the run in {self.path}", saved, asked)

    def write_recipe(self, recipe: Any) -> None:
        """Write the recipe, package versions and commit."""
        import yaml

        with atomic_write(self.recipe_file) as temporary:
            temporary.write_text(yaml.safe_dump({"recipe": to_dict(recipe), **provenance()}, sort_keys=False))

    def read_recipe(self, kind: type = Recipe) -> Any:
        """The recipe of the run in this folder."""
        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"there is no run in {self.path}: {self.recipe_file.name} is missing")
        values = read_recipe_values(self.recipe_file)
        wanted: str = kind.command  # type: ignore[attr-defined]
        if (command := command_of(values)) != wanted:
            raise ValueError(
                f"{self.path} holds a run of `sima {command}`, not of `sima {wanted}`: use `sima {command}`, or give "
                "another folder"
            )
        try:
            return recipe_from_file(kind, values, self.recipe_file)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.recipe_file} is damaged and cannot be read: {error}") from error


def command_of(values: Mapping[str, Any]) -> str:
    """The `sima` command that has trained a run, from the settings in its recipe file."""
    model = values.get("model")
    names = {*values, *(f"model.{name}" for name in (model if isinstance(model, dict) else ()))}
    return next((command for command, setting in SETTINGS_OF.items() if setting in names), Recipe.command)


def refuse_changes(what: str, saved: Any, asked: Any) -> None:
    """Raise if two recipes differ, and list the settings; `what` has the saved one."""
    changed = differences(to_dict(saved), to_dict(asked))
    if changed:
        raise ValueError(
            f"{what} has a different recipe: {'; '.join(changed)}. Undo these changes, or start a new run with another "
            "--out"
        )


def provenance() -> dict[str, Any]:
    """Versions of Python and packages, and the commit if the source is a git checkout."""
    versions = {"sima-attn": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "timm", "lightning", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit()}


def _commit() -> str | None:
    """The commit of the git repository that tracks this file; a repository that merely contains it is another one."""

    def git(*command: str) -> str:
        run = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
