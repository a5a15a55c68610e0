"""How converted transformers models are saved and loaded.

transformers does not save the choice of an attention. So the configuration of a converted model becomes one of a class
of its own, which lists the converted modules and is written under the model type "sima_attn". With this package
imported, the Auto classes know that type, and build the model with its attentions converted. Nothing else loads it:

- The written configuration is sealed. It has an entry that every other configuration class refuses to set, with or
  without this package, at any depth.
- A configuration that was read names no attention that transformers knows: no other model can be built from it.
- The configuration of a converted model in memory names our attention as that of the whole model. Another model that
  was built from it, and not converted, raises at its first attention.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial, reduce, wraps
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig  # the name that older versions have too: this runs when they are imported
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from sima_attn.conversion.huggingface import NAME, calls_interface, register, set_implementation, shared_config
from sima_attn.conversion.mixins import Mixin, with_mixin, without_mixin
from sima_attn.conversion.modules import Refused
from sima_attn.conversion.placing import CONVERTED, converted_modules, place
from sima_attn.nn import follow_image_grid

MODEL_TYPE = "sima_attn"
MARK = "sima_attn"  # the entry that lists the converted modules
IN_USE = "_sima_in_use"  # set where a model with converted attentions has this configuration
# Properties of every configuration that cannot be set: an entry of that name in config.json is an error on loading.
# In a live configuration the property hides the entry. Two, because transformers may drop one of them.
SEALS = ("use_return_dict", "sub_configs")
SEAL = (
    "converted to another attention: install sima-attn, import sima_attn, and load this model with an Auto class of "
    "transformers or with sima_attn.conversion.load_pretrained(MODEL_CLASS, PATH)"
)


class ConvertedConfig(Mixin):
    """The configuration of a model with converted attentions, whatever its class was before."""

    use_return_dict = property(lambda self: self.return_dict)  # theirs warns, and saving reads what is sealed

    @property
    def _attn_implementation_internal(self) -> str:
        return NAME if IN_USE in vars(self) else SEAL

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        if value not in (NAME, None):
            raise ValueError(
                f"attn_implementation={value!r} cannot be set: the attentions of this model were converted. "
                "Remove the argument; report.undo() takes a conversion back"
            )

    def to_dict(self) -> dict[str, Any]:
        """As of the original class, under the model type of converted models."""
        entries = super().to_dict()  # type: ignore[misc]
        entries["model_type"] = MODEL_TYPE
        entries.pop(IN_USE, None)
        return entries


class SavedConfig(PretrainedConfig):
    """Reads a configuration that was written under the model type "sima_attn"; gives a ConvertedConfig."""

    model_type = MODEL_TYPE
    original: ClassVar[Any] = None  # the class that is wanted, for a part of what was saved

    def __new__(cls, **entries) -> Any:
        """How a composite configuration builds those of its parts."""
        return cls.from_dict(entries)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs) -> Any:  # type: ignore[override]
        """As for any configuration. The inherited method would read a converted part as the whole configuration."""
        entries, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.from_dict(entries, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """The configuration that these entries were written of, with `kwargs` as in any configuration."""
        register()
        entries = deepcopy(config_dict)
        marks = list(_unseal(entries))
        key = getattr(cls.original, "base_config_key", "")
        if key in entries and cls.original.model_type != entries["model_type"]:
            entries = entries[key]
            marks = [(keys[1:], modules) for keys, modules in marks if keys[:1] == (key,)]
        if not marks:
            raise ValueError("this is no converted model: load it with from_pretrained")
        read: Any = (cls.original or CONFIG_MAPPING[entries["model_type"]]).from_dict(entries, **kwargs)
        config = read[0] if kwargs.get("return_unused_kwargs") else read
        whole: dict[tuple[str, ...], dict[str, Any]] = {(): {}}  # a ConvertedConfig too, for the Auto classes
        for keys, modules in (whole | dict(marks)).items():
            part = reduce(getattr, keys, config)
            implementation = part._attn_implementation
            _mark(part, modules)
            part._attn_implementation_internal = implementation  # refused where an argument chose another
        return read


AutoConfig.register(MODEL_TYPE, SavedConfig, exist_ok=True)


def _let_trainer_resume() -> None:
    """Let the base class of configurations read a sealed file: `Trainer` asks it for the version in a checkpoint."""
    read = PretrainedConfig.from_json_file.__func__  # type: ignore[attr-defined]

    @wraps(read)
    def from_json_file(cls: Any, json_file: Any) -> Any:
        entries = cls._dict_from_json_file(json_file)
        is_sealed = cls is PretrainedConfig and entries.get("model_type") == MODEL_TYPE
        return SavedConfig.from_dict(entries) if is_sealed else read(cls, json_file)

    PretrainedConfig.from_json_file = classmethod(from_json_file)  # type: ignore[assignment]


_let_trainer_resume()


class ConvertedModel(Mixin):
    """A transformers model that is built with the attentions converted that its configuration lists."""

    def __init__(self: Any, config: Any, *args, **kwargs) -> None:
        for part in _with_sub_configs(config):
            if isinstance(part, ConvertedConfig):
                vars(part)[IN_USE] = True
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        exchanged: dict[Any, Any] = {}
        for path, options in _listed(self).items():
            if CONVERTED not in vars(self.get_submodule(path)):  # by a part that is a ConvertedModel itself
                try:
                    place(self, path, options.pop("attention"), options, exchanged)
                except (Refused, TypeError) as error:  # TypeError: options that the attention does not have
                    raise ValueError(f"{path} cannot be converted as it was when it was saved: {error}") from error
        follow_image_grid(self)
        write_marks(self)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs) -> Any:
        """As for any model; weights of converted attentions that are not there are an error, not a log message."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        attentions = tuple(f"{path}." for path in converted_modules(model))
        if missing := sorted(name for name in info["missing_keys"] if name.startswith(attentions)):
            raise ValueError(
                f"weights of converted attentions are missing: {', '.join(missing[:5])}. config.json and the weights "
                "are not of the same model; save the converted model again with save_pretrained"
            )
        return (model, info) if output_loading_info else model


@cache
def converted_model_class(cls: Any) -> Any:
    """The model class that builds the converted model; its `from_pretrained` reads what was saved."""
    mixed = with_mixin(ConvertedModel, cls)
    mixed.config_class = type("SavedConfig", (SavedConfig,), {"original": cls.config_class})
    return mixed


@cache
def _converted_config_class(cls: Any) -> Any:
    from transformers.models.auto import modeling_auto

    mixed = with_mixin(ConvertedConfig, cls)
    mixed.__module__ = __name__  # classes of transformers itself cannot be registered
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is not None and cls in mapping:
            models = mapping[cls]
            several = isinstance(models, list | tuple)
            converted = tuple(map(converted_model_class, models)) if several else converted_model_class(models)
            mapping.register(mixed, converted, exist_ok=True)
    return mixed


def load_pretrained(model_class: Any, path: Any, **kwargs) -> Any:
    """A converted model that `save_pretrained` has written, with the converted attentions where it had them.

    Args:
        model_class: A model class of transformers, such as CLIPModel or AutoModel.
        path: The folder.
        kwargs: As for `from_pretrained`.
    """
    if "config" in kwargs:
        raise ValueError("config is that of the converted model: remove the argument")
    if hasattr(model_class, "config_class"):
        return converted_model_class(without_mixin(model_class)).from_pretrained(path, **kwargs)
    where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
    return model_class.from_pretrained(path, config=SavedConfig.from_pretrained(path, **where), **kwargs)


def load_saved(folder: Path) -> Any:
    """The model that `save_pretrained` has written, converted or not, in the class that was saved."""
    import transformers

    entries, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    names = entries.get("architectures") or []
    model_class = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    if model_class is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no model class {names[0]!r}, of which {folder} is; install "
            "the version of transformers that saved it"
        )
    is_converted = any(True for _ in _unseal(deepcopy(entries)))
    load = partial(load_pretrained, model_class) if is_converted else model_class.from_pretrained
    with _no_progress_bar():
        return load(folder, local_files_only=True)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without the bar of transformers, which prints two lines for a file that is read in milliseconds."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_marks(model: Any) -> None:
    """Let the configurations of the transformers models in here say which of their attentions are converted."""
    converted = converted_modules(model)
    for path, part in _parts(model):
        prefix = f"{path}." if path else ""
        modules = {name.removeprefix(prefix): what for name, what in converted.items() if name.startswith(prefix)}
        if modules:
            _mark(part.config, modules)
            vars(part.config)[IN_USE] = True
        else:
            _unmark(part.config)
        for module in part.modules():
            if calls_interface(module) and CONVERTED not in vars(module):  # it keeps its softmax
                module.config = shared_config(module)
                if isinstance(module.config, ConvertedConfig):
                    set_implementation(module, part.get_correct_attn_implementation(None))


def check_marks(model: Any) -> None:
    """Raise if the configuration of a model, which is being saved, does not list its converted attentions."""
    converted, listed = converted_modules(model), _listed(model)
    if converted != listed:
        wrong = next(path for path in (*converted, *listed) if converted.get(path) != listed.get(path))
        raise ValueError(
            f"{wrong} was converted, or put back, without this {type(model).__name__} around it, whose configuration "
            "would be saved without it. Undo the conversion, and convert this model, with `where` for parts of it"
        )


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """The transformers models in here. Of those that share one configuration, the outermost."""
    from transformers import PreTrainedModel

    seen = set()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield path, module


def _listed(model: Any) -> dict[str, dict[str, Any]]:
    """The paths of the attentions that the configuration of the model lists as converted, in it and in its parts."""
    configs = {id(config) for config in _with_sub_configs(model.config)}
    listed = {}
    for path, part in _parts(model):
        if isinstance(part.config, ConvertedConfig) and id(part.config) in configs:
            for name, what in _own_paths(part, vars(part.config)[MARK]["modules"]).items():
                listed[f"{path}.{name}" if path else name] = dict(what)
    return listed


def _with_sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _with_sub_configs(getattr(config, name))


def _own_paths(model: Any, modules: dict[str, Any]) -> dict[str, Any]:
    """The paths in this model, which may be saved with a head and loaded without one, or the other way round."""
    prefix = f"{model.base_model_prefix}."
    saved_with_head = any(path.startswith(prefix) for path in modules)
    paths, own = {path for path, _ in model.named_modules(remove_duplicate=False)}, {}
    for path, what in modules.items():
        found = [one for one in (path, prefix + path, path.removeprefix(prefix)) if one in paths]
        if found:
            own[found[0]] = what
        elif not (saved_with_head and not hasattr(model, model.base_model_prefix) and not path.startswith(prefix)):
            raise ValueError(
                f"{path} was converted, and there is none in this {type(model).__name__}; load the model with the "
                "class and the version of transformers that saved it"
            )
    return own


def _mark(config: Any, modules: dict[str, Any]) -> None:
    read_only = [name for name in SEALS if _is_read_only(type(config), name)]
    if not read_only:
        raise RuntimeError("this version of transformers would load a converted model as softmax: use 5.17 to 5.23")
    config.__class__ = _converted_config_class(without_mixin(type(config)))
    # Not "model_type": the class of that type would take the mark for a whole configuration.
    mark = {"original_model_type": config.model_type, "modules": modules}
    vars(config).update({**dict.fromkeys(read_only, SEAL), MARK: mark})


def _unmark(config: Any) -> None:
    config.__class__ = without_mixin(type(config))
    for key in (*SEALS, MARK, IN_USE):
        vars(config).pop(key, None)


def _is_read_only(cls: type, name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    return isinstance(found, property) and found.fset is None


def _unseal(entries: dict[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Turn entries back into those of the original configuration; yield where there are marks, and what they list."""
    if entries.get("model_type") == MODEL_TYPE:
        for seal in SEALS:
            entries.pop(seal, None)
        mark = entries.pop(MARK)
        entries["model_type"] = mark["original_model_type"]
        yield keys, mark["modules"]
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _unseal(value, (*keys, key))
