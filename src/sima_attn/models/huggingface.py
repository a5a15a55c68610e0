"""Image models of transformers -> modules with timm's interface, which the rest of the package takes.

Shapes: B batch, N tokens, C channels, K classes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sima_attn.conversion import convert
from sima_attn.conversion.huggingface import core_of
from sima_attn.conversion.placing import CONVERTED
from sima_attn.models.image_processor import preprocessing_of, write_processor
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.token_ref import tokens_at

CONFIG = "config.json"  # in a folder of save_pretrained
TRANSFORMERS = "transformers"  # in the metadata of a run: what `describe` returns


def is_folder(path: Path) -> bool:
    """True for a folder that `save_pretrained` has written."""
    return (path / CONFIG).is_file()


class TimmInterface(nn.Module):
    """A model of transformers that takes images [B, 3, height, width] and gives logits [B, K] or features [B, C].

    Features are the `pooler_output` of the model, or the mean over its tokens where there is none. Of a model for
    images and texts, such as CLIPModel, only the vision model runs. Images of another size than that of the
    configuration are taken where the family interpolates its position embeddings.
    """

    def __init__(self, model: Any, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network = model
        self.num_classes = model.config.num_labels if "ForImageClassification" in type(model).__name__ else 0
        self.feature_info = [{"reduction": getattr(self.encoder.config, "patch_size", 16)}]
        self.pretrained_cfg = {
            **preprocessing.to_timm(),
            "architecture": type(model).__name__,
            "label_names": _class_names(model.config, self.num_classes),
        }

    @property
    def encoder(self) -> Any:
        """The part of the model that gives the final tokens."""
        model: Any = self.network
        return getattr(model, "vision_model", model.base_model)

    @property
    def used(self) -> Any:
        """The part of the model that runs: with a classifier all of it, otherwise the encoder."""
        return self.network if self.num_classes else self.encoder

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of the encoder, first to last; none where it has stages."""
        count = getattr(self.encoder.config, "num_hidden_layers", None)
        lists = (one for one in self.encoder.modules() if isinstance(one, nn.ModuleList) and len(one) == count)
        return list(next(lists, ()))

    @property
    def norm(self) -> nn.Module | None:
        """The norm after the last layer."""
        names = ("layernorm", "post_layernorm", "norm")
        return next((getattr(self.encoder, name) for name in names if hasattr(self.encoder, name)), None)

    @cached_property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before those of the patches, by one forward: no attribute tells for all families."""
        _, height, width = self.pretrained_cfg["input_size"]
        patch = self.feature_info[0]["reduction"]
        with eval_mode(self), torch.no_grad():
            tokens, _ = self.tokens_and_logits(next(self.parameters()).new_zeros(1, 3, height, width))
        return tokens.shape[1] - (height // patch) * (width // patch)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, height, width] -> logits [B, K], or features [B, C]."""
        return self._run(images).logits if self.num_classes else self.features_and_tokens(images)[0]

    def features_and_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, C] and final tokens [B, N, C] of a model without a classifier."""
        output = self._run(images)
        pooled = getattr(output, "pooler_output", None)
        return output.last_hidden_state.mean(1) if pooled is None else pooled, output.last_hidden_state

    def tokens_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Final tokens [B, N, C] and logits [B, K], K = 0 without a classifier, in one forward."""
        seen: list[Tensor] = []
        hook = self.encoder.register_forward_hook(lambda module, inputs, out: seen.append(out.last_hidden_state))
        try:
            output = self._run(images)
        finally:
            hook.remove()
        return seen[0], output.logits if self.num_classes else images.new_empty(len(images), 0)

    def reset_classifier(self, num_classes: int) -> None:
        """Remove the classifier; `num_classes` must be 0."""
        if num_classes:
            raise ValueError(f"a model of transformers gets no new classifier here, got num_classes={num_classes}")
        self.num_classes, self.network = 0, self.encoder

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """The modules after the encoder; more than one in a distilled DeiT."""
        return tuple(module for module in self.network.children() if module is not self.encoder)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[float, ...]]:
        """The layer of a parameter by its name, for learning rates per layer: embeddings first, the classifier last."""

        def layer(name: str) -> tuple[float, ...]:
            if "embeddings." in name or ".pre_layrnorm." in name:
                return (-1.0,)
            return tuple(map(float, re.findall(r"\.(?:layers?|blocks|stages?)\.(\d+)\.", name))) or (float("inf"),)

        return layer

    def no_weight_decay(self) -> set[str]:
        """Embeddings of positions and of single tokens; the projection of the patches has weight decay."""
        return {name for name, _ in self.named_parameters() if "embeddings." in name and ".patch_embed" not in name}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the layers in the backward pass to save memory."""
        network: Any = self.network
        (network.gradient_checkpointing_enable if enable else network.gradient_checkpointing_disable)()

    def _run(self, images: Tensor) -> Any:
        """The output of transformers for images of any size, where position embeddings can be interpolated."""
        size = getattr(self.encoder.config, "image_size", None)
        own = tuple(size) if isinstance(size, list | tuple) else (size, size)
        # Of the encoder: the classifier of CLIP hands the argument on without a name for it.
        can_interpolate = "interpolate_pos_encoding" in inspect.signature(self.encoder.forward).parameters
        if can_interpolate and tuple(images.shape[2:]) != own:
            return self.used(images, interpolate_pos_encoding=True)
        return self.used(images)


def users_model(model: nn.Module) -> nn.Module:
    """The model as the user knows it: the model of transformers, not the `TimmInterface` around it."""
    return model.network if isinstance(model, TimmInterface) else model


def users_path(model: nn.Module, path: str) -> str:
    """The path of a module of this model as the user knows it: in the model of transformers, not in `TimmInterface`."""
    return path.removeprefix("network.") if isinstance(model, TimmInterface) else path


def convert_encoder(model: TimmInterface, attention: str) -> None:
    """Convert the attentions of the encoder. A pooling head after the final tokens keeps its softmax."""
    convert(model.used, attention, where=lambda path, module: not isinstance(module, nn.MultiheadAttention))


def keep_scale(model: TimmInterface, trained_size: int) -> bool:
    """Set `token_ref` of the converted SimA attentions that have none, as options of their conversion.

    They are saved with the model. Returns whether there are any.
    """
    cores: dict[nn.Module, Any] = {module: core for module in model.modules() if (core := core_of(module))}
    without = {module: core for module, core in cores.items() if getattr(core, "token_ref", 0.0) is None}
    counts = tokens_at(model, list(without.values()), trained_size) if without else []
    for (module, core), tokens in zip(without.items(), counts, strict=True):
        core.token_ref = tokens
        vars(module)[CONVERTED] = {**vars(module)[CONVERTED], "token_ref": tokens}
    return bool(without)


def load_folder(path: Path) -> TimmInterface:
    """The image model in a folder of `save_pretrained`, converted or not, in the class that was saved."""
    from sima_attn.conversion.saved import load_saved

    return with_timm_interface(load_saved(path), path)


def with_timm_interface(model: Any, folder: Path | None = None) -> TimmInterface:
    """A model of transformers with timm's interface and the image processor of its folder.

    Raises ValueError where no image alone is its input, or a timm model gives its tokens.
    """
    if hasattr(model, "timm_model"):
        raise ValueError(f"{type(model).__name__} holds a timm model; give that one, made by timm.create_model")
    encoder = getattr(model, "vision_model", model)
    if encoder.main_input_name != "pixel_values":
        raise ValueError(
            f"{type(model).__name__} takes {encoder.main_input_name!r}; an image model is needed, such as ViTModel, "
            "Dinov2Model, CLIPModel, or a model for image classification"
        )
    return TimmInterface(model, preprocessing_of(model, folder))


def _class_names(config: Any, count: int) -> list[str]:
    """The names of the classes; none where they are transformers' placeholders, LABEL_0 and so on."""
    names = [str(config.id2label.get(k, k)) for k in range(count)]
    return [] if names == [f"LABEL_{k}" for k in range(count)] else names


def save_folder(model: TimmInterface, folder: Path, preprocessing: Preprocessing) -> None:
    """Write the model of transformers, and how images are made ready for it, as an image processor."""
    from sima_attn.conversion.saved import write_marks

    write_marks(model.network)  # attentions may have been put back since they were converted
    cast(Any, model.network).save_pretrained(folder)
    write_processor(preprocessing, folder)


def describe(model: Any) -> dict[str, Any]:
    """The class and the configuration of a model, as plain values, from which `build` makes it again."""
    return {"class": type(model).__name__, "config": json.loads(model.config.to_json_string(use_diff=False))}


def describe_classifier(model: Any, classes: Sequence[str]) -> dict[str, Any]:
    """As `describe`, of the image classifier of the same family with the same encoder, for other classes.

    The classifier of a vision model, such as CLIPVisionModel, is that of the whole family.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    from sima_attn.conversion.saved import write_marks

    write_marks(model)  # of attentions that were converted in a part of it
    described = describe(model)
    if "ForImageClassification" not in described["class"]:
        family = model.config.model_type.removesuffix("_vision_model")
        known = CLASSIFIERS.get(family)
        if known is None:
            raise ValueError(
                f"transformers has no image classifier for {described['class']}; give a model of a family that has "
                "one, such as ViTModel, Dinov2Model or CLIPModel"
            )
        described["class"] = known if isinstance(known, str) else known[0]
        if family != model.config.model_type:
            described["config"] = _config_around(described["config"], family)
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: k for k, name in enumerate(classes)}}
    return {**described, "config": {**described["config"], **labels}}


def _config_around(vision_config: dict[str, Any], family: str) -> dict[str, Any]:
    """The configuration of a model for images and texts with this vision model, converted or not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from sima_attn.conversion.saved import MODEL_TYPE, SavedConfig

    is_converted = vision_config["model_type"] == MODEL_TYPE
    read: Any = SavedConfig if is_converted else CONFIG_MAPPING[family]
    config = read.from_dict({"model_type": family, "vision_config": vision_config})
    return json.loads(config.to_json_string(use_diff=False))


def build(description: Mapping[str, Any]) -> Any:
    """The model of `describe`, with random weights; attentions that were converted are so again."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from sima_attn.conversion.saved import ConvertedConfig, converted_model_class

    cls = getattr(transformers, description["class"], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"transformers {transformers.__version__} has no model class {description['class']!r}")
    config = CONFIG_MAPPING[description["config"]["model_type"]].from_dict(dict(description["config"]))
    return (converted_model_class(cls) if isinstance(config, ConvertedConfig) else cls)(config)
