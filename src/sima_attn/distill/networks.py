"""Teacher and student: the same network, in which the student has another attention.

Shapes: B batch, N tokens, C channels, K classes.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.conversion.huggingface import core_of, projections_of
from sima_attn.conversion.placing import converted_modules
from sima_attn.models import huggingface
from sima_attn.models.building import build_model, without_sources
from sima_attn.models.huggingface import TRANSFORMERS, TimmInterface
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.settings import ModelSettings
from sima_attn.nn import Attention


class Output(NamedTuple):
    """The final tokens [B, N, C] of a network, and its logits [B, K], K = 0 without a classifier."""

    tokens: Tensor
    logits: Tensor


def settings_of(model: nn.Module, kwargs: Mapping[str, Any] | None = None) -> ModelSettings:
    """The settings of a timm model: its name, which it knows, and the arguments that it was created with.

    Those of a model of transformers are its class alone; `description_of` has its configuration. The number of classes
    is that of the model, whatever it was created with.
    """
    if kwargs and isinstance(model, TimmInterface):
        raise ValueError(f"model_kwargs are arguments of timm.create_model; a model of transformers has none: {kwargs}")
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if name is None:
        raise ValueError(
            f"this {type(model).__name__} does not say which model of timm it is; create it with timm.create_model, or "
            "pass the name of the model or the folder of its run"
        )
    return ModelSettings(name, kwargs={key: value for key, value in (kwargs or {}).items() if key != "num_classes"})


def build_student(teacher: nn.Module, settings: ModelSettings, attention: str) -> nn.Module:
    """The network of the teacher with another attention and the teacher's weights; new parameters as they start.

    A timm model is built from its settings, so that the run folder alone is enough to build it again.
    """
    if isinstance(teacher, TimmInterface):
        return _converted_copy(teacher, attention)
    student = build_model(without_sources(replace(settings, attention=attention)), classes_of(teacher))
    new, wanted, given = tuple(f"{path}." for path in exchanged(teacher, student)), shapes(student), shapes(teacher)
    foreign = sorted(
        name for name in wanted | given if not name.startswith(new) and wanted.get(name) != given.get(name)
    )
    if foreign:
        raise ValueError(
            f"{settings.name} as timm builds it does not fit the teacher: {', '.join(foreign[:5])} differ; pass the "
            "arguments that the teacher was created with as model_kwargs"
        )
    student.load_state_dict(teacher.state_dict(), strict=False)
    return student


def _converted_copy(teacher: TimmInterface, attention: str) -> TimmInterface:
    """A copy with converted attentions in its encoder."""
    student = copy.deepcopy(teacher).requires_grad_(False)
    student.used.requires_grad_(True)
    huggingface.convert_encoder(student, attention)
    return student


def description_of(teacher: nn.Module) -> dict[str, Any]:
    """What the metadata of a run must have, beside the recipe, to build its teacher again."""
    return {TRANSFORMERS: huggingface.describe(teacher.network)} if isinstance(teacher, TimmInterface) else {}


def rebuild_teacher(settings: ModelSettings, data: Preprocessing, about: Mapping[str, Any]) -> nn.Module:
    """The teacher of a run with random weights, from the settings of the teacher and the metadata of the run."""
    if TRANSFORMERS in about:
        return TimmInterface(huggingface.build(about[TRANSFORMERS]), data)
    return build_model(without_sources(settings), len(about["classes"]))


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the tensors of a model."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def classes_of(model: nn.Module) -> int:
    """Number of classes of a timm model; 0 without a classifier."""
    return int(getattr(model, "num_classes", 0))


def exchanged(teacher: nn.Module, student: nn.Module) -> list[str]:
    """Paths of the attentions in which the student differs from the teacher."""
    if isinstance(teacher, TimmInterface):  # where modules stay, and get another core
        paths = [path for path in converted_modules(student) if path not in converted_modules(teacher)]
    else:
        theirs = dict(teacher.named_modules())
        paths = [
            path
            for path, module in student.named_modules()
            if isinstance(module, Attention) and type(theirs.get(path)) is not type(module)
        ]
    if not paths:
        raise ValueError(
            f"teacher and student of this {type(teacher).__name__} have the same attentions: nothing would be "
            "learned; choose another attention"
        )
    return paths


@contextmanager
def recorded(model: nn.Module, paths: list[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """A dictionary that each forward fills with input and output [B, N, C] of the modules at these paths."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str):
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            found[path] = args[0] if args else kwargs["hidden_states"], _tensor(output)

        return keep

    with ExitStack() as hooks:
        for path in paths:
            hooks.callback(model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True).remove)
        yield found


def attend(attention: nn.Module, tokens: Tensor) -> Tensor:
    """Output [B, N, C] of an attention of timm or transformers."""
    return _tensor(attention(tokens))


def _tensor(output: Any) -> Tensor:
    """Attentions of transformers return (output, weights)."""
    return output[0] if isinstance(output, tuple) else output


def run(model: Any, images: Tensor) -> Output:
    """Final tokens and logits of a model."""
    if isinstance(model, TimmInterface):
        return Output(*model.tokens_and_logits(images))
    features = model.forward_features(images)
    tokens = features.flatten(2).mT if features.dim() == 4 else features  # [B, N, C]
    logits = model.forward_head(features) if classes_of(model) else features.new_empty(len(images), 0)
    return Output(tokens, logits)


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted|^2 / |wanted|^2 over all elements, in float32."""
    wanted = wanted.float()
    return (found.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def output_loss(found: Output, wanted: Output, logits_weight: float) -> Tensor:
    """Relative error of the tokens, plus the divergence of the class probabilities from the teacher's."""
    loss = relative_error(found.tokens, wanted.tokens)
    if wanted.logits.shape[1] and logits_weight:
        p, q = F.log_softmax(wanted.logits.float(), dim=1), F.log_softmax(found.logits.float(), dim=1)
        loss = loss + logits_weight * F.kl_div(q, p, log_target=True, reduction="batchmean")
    return loss


@torch.no_grad()
def block_errors(teacher: nn.Module, student: nn.Module, paths: list[str], images: Tensor) -> dict[str, float]:
    """Relative error of each new attention, given the teacher's input."""
    with recorded(teacher, paths) as found:
        run(teacher, images)
    return {path: relative_error(attend(student.get_submodule(path), x), y).item() for path, (x, y) in found.items()}


@torch.no_grad()
def fit_gains(teacher: nn.Module, student: nn.Module, paths: list[str], images: Tensor) -> None:
    """Scale the heads of each new attention by least squares against the teacher's output.

    The output is linear in the gains. Without this the attention of a trained model may begin a hundred times too
    large: its queries and keys have means that SimA was not trained with. Or too small: plain SimA divides by the
    number of tokens. An attention without the parameter `gain` gets its gains folded into its weights.
    """
    with recorded(teacher, paths) as found:
        run(teacher, images)
    for path, (x, y) in found.items():
        attention: Any = student.get_submodule(path)
        core: Any = core_of(attention) or attention
        gain: Any = getattr(core, "gain", None)
        folded = projections_in(attention) if gain is None else None
        if gain is None and folded is None:  # YOLOS projects its output elsewhere
            continue
        scale: Tensor = gain if folded is None else folded.out
        before = scale.clone()
        outputs = []  # of no head, and of each head alone
        for gains in (scale.new_zeros(core.num_heads), *torch.eye(core.num_heads).to(scale)):
            scale.copy_(before * per_column(gains, before) if gain is None else gains)
            outputs.append(attend(attention, x).double().flatten())
        rest, alone = outputs[0], torch.stack(outputs[1:]) - outputs[0]  # [H, B * N * C]
        products = alone @ alone.mT  # [H, H]
        ridge = 1e-6 * products.diagonal().mean() * torch.eye(len(products)).to(products)
        gains = torch.linalg.solve(products + ridge, alone @ (y.double().flatten() - rest)).to(scale.dtype)
        if folded is None:
            gain.copy_(gains)
        else:
            scale.copy_(before)
            fold_gains(folded, gains)


class Projections(NamedTuple):
    """The tensors of an attention that gains are folded into.

    `v` has the weight [C, C] and the bias [C] of the layer that gives v, and is empty where a norm follows it; `out` is
    the weight [C, C] of the output projection.
    """

    v: list[Tensor]
    out: Tensor


def projections_in(attention: Any) -> Projections | None:
    """Those of our attentions and of converted ones of transformers; None where one of the two is missing."""
    if core_of(attention) is None:
        out, qkv = attention.proj.weight, attention.qkv
        v = [qkv.weight, qkv.bias] if isinstance(attention.norm, nn.Identity) else []
        return Projections([one[-out.shape[1] :] for one in v if one is not None], out)  # the last rows are those of v
    found = projections_of(attention)
    if found is None:
        return None
    value, output = found
    return Projections([one for one in (value.weight, value.bias) if one is not None], output.weight)


def fold_gains(projections: Projections, gains: Tensor) -> None:
    """Multiply the output of each head by its gain [H], in the weights of v and of the output projection.

    Each of the two gets the square root: Adam hardly changes large weights, and the gains of plain SimA are about the
    number of tokens. Where a norm is between the two, the gain is in the output projection alone.
    """
    roots = gains.abs().sqrt().clamp_min(1e-6) if projections.v else torch.ones_like(gains)
    projections.out.mul_(per_column(gains / roots, projections.out))
    for of_v in projections.v:
        of_v.movedim(0, -1).mul_(per_column(roots, projections.out))


def per_column(gains: Tensor, weight: Tensor) -> Tensor:
    """Gains per head [H] -> gains per column of the output projection [C]."""
    return gains.repeat_interleave(weight.shape[1] // len(gains))
