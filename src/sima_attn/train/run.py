"""The folder of a run: its recipe, checkpoints, logs and curve, and the rules for starting and going on.

recipe.yaml    the resolved recipe, versions and commit        checkpoints/  step-*.pt
train.csv, eval.csv   a row every few steps, a row an evaluation      tensorboard/
learning_curve.png    at the end                                weights.safetensors  the trained model, at the end
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sima_attn._files import atomic_write
from sima_attn._settings import differences, to_dict
from sima_attn._version import __version__
from sima_attn.models.weight_files import CHECKPOINTS, RECIPE, WEIGHTS, checkpoints
from sima_attn.train.recipe_files import recipe_from_file
from sima_attn.train.recipes import Recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / RECIPE

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def weights(self) -> Path:
        """The trained model, without the optimiser."""
        return self.path / WEIGHTS

    @property
    def curve(self) -> Path:
        """The learning curve."""
        return self.path / "learning_curve.png"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process can train here; the system takes the lock back when this one ends, however."""
        try:
            import fcntl
        except ImportError:  # Windows has other locks
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / ".lock"
        with open(path, "w") as file:
            try:
                # Not flock: the worker processes would have that lock too, and live on for a while after a kill.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"another process is training in {self.path}; wait for it, or give another folder with --out"
                ) from None
            except OSError:  # a disk of another machine may have no locks
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def check(self, recipe: Any, *, resume: bool) -> None:
        """Raise unless the folder is free for a new run, or holds the very run to go on with."""
        for folder in (self.path, self.checkpoints):
            if os.path.lexists(folder) and not folder.is_dir():
                raise ValueError(f"a run is a folder, and {folder} is a file or a broken link; give another --out")
        if not resume:
            self._check_unused()
            return
        refuse_changes(self.path, self.read_recipe(type(recipe)), recipe)
        left = [file.name for file in (self.weights, self.path / "train.csv") if file.exists()]
        if left and not checkpoints(self.checkpoints):
            raise ValueError(
                f"the run in {self.path} has {' and '.join(left)}, but no checkpoint to go on from; start a new run "
                "with another --out"
            )

    def _check_unused(self) -> None:
        """Raise if a run has left anything here that a new run would load or overwrite."""
        if os.path.lexists(self.recipe_file):
            raise ValueError(
                f"{self.path} holds a run already: go on with it by --resume, or give another folder with --out"
            )
        files = (self.weights, self.path / "train.csv", self.path / "eval.csv", *checkpoints(self.checkpoints)[:1])
        left = [str(file.relative_to(self.path)) for file in files if os.path.lexists(file)]
        if left:
            raise ValueError(
                f"{self.path} holds {' and '.join(left)} of a run whose {self.recipe_file.name} is missing; put it "
                "back and add --resume, or give another folder with --out"
            )

    def check_finished(self, recipe: Any) -> None:
        """Raise unless the finished run here is the one of the recipe; how it ran (`run`) may differ."""
        made = self.read_recipe(type(recipe))
        if Path(made.data.path).resolve() != Path(recipe.data.path).resolve():
            raise ValueError(
                f"the run in {self.path} is of the images in {made.data.path}, not of those in {recipe.data.path}; "
                "give another --out"
            )
        refuse_changes(self.path, made, replace(recipe, run=replace(made.run, seed=recipe.run.seed)))

    def write_recipe(self, recipe: Any) -> None:
        """Keep the recipe, and what it ran on."""
        import yaml

        with atomic_write(self.recipe_file) as temporary:
            temporary.write_text(yaml.safe_dump({"recipe": to_dict(recipe), **provenance()}, sort_keys=False))

    def read_recipe(self, kind: type = Recipe) -> Any:
        """The recipe of the run in this folder."""
        import yaml

        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"there is no run in {self.path}: {self.recipe_file.name} is missing")
        try:
            values = yaml.safe_load(self.recipe_file.read_text())["recipe"]
            if set(values) != {setting.name for setting in fields(kind)}:
                raise ValueError(
                    f"{self.path} holds another kind of run: its recipe has {', '.join(values)}, a {kind.__name__} has "
                    f"{', '.join(setting.name for setting in fields(kind))}"
                )
            return recipe_from_file(kind, values, self.recipe_file)
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.recipe_file} is damaged, no recipe can be read from it: {error}") from error


def refuse_changes(folder: Path, made: Any, asked: Any) -> None:
    """Raise where the recipe of the run in a folder is not the one that is asked for, and say in what."""
    changed = differences(to_dict(made), to_dict(asked))
    if changed:
        raise ValueError(
            f"the run in {folder} has another recipe: {'; '.join(changed)}. Go on without these changes, or "
            "start a new run with another --out"
        )


def provenance(packages: Sequence[str] = ("torch", "torchvision", "timm", "lightning", "numpy")) -> dict[str, Any]:
    """Versions of what takes part, and the commit of the source where it is a checkout."""
    versions = {"sima-attn": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit()}


def _commit() -> str | None:
    """The commit of the checkout that this file belongs to; one that merely contains it is another project's."""

    def git(*command: str) -> str:
        run = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
