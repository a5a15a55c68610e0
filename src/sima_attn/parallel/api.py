"""parallelize: a model whose tokens are split by image rows over the processes of a mesh."""

from typing import Any

import torch.distributed as dist
from timm.layers import LayerScale, PatchDropout, PatchEmbed, RmsNorm, SimpleNorm
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.xcit import ClassAttentionBlock, ConvPatchEmbed, XCABlock, Xcit
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.conversion.modules import looks_like_attention
from sima_attn.models import cvt
from sima_attn.models.cvt import Cvt
from sima_attn.models.huggingface import users_model
from sima_attn.models.miniature import ConvStem, LocalBlock, MiniVit, MiniXcit
from sima_attn.models.patch_embed import PatchConv2d, ProductPatchEmbed
from sima_attn.models.xcit import BlockWithoutLpi, SimXcit
from sima_attn.nn import Relu2Attention, SimAttention, SimClassAttention
from sima_attn.nn.local_values import LocalValues
from sima_attn.nn.relu2_wide import FeatureMap
from sima_attn.nn.rotation import Rotation
from sima_attn.ops.sequence_parallel import Group, process_group
from sima_attn.parallel.cvt import SplitCvt
from sima_attn.parallel.layers import conv_reason
from sima_attn.parallel.model import POOLS, SplitModel
from sima_attn.parallel.vit import SplitVit
from sima_attn.parallel.xcit import SplitXcit

SEQUENCE = "sequence"  # the name of the dimension of a mesh that splits the tokens
FAMILIES: dict[type[SplitModel], tuple[type[nn.Module], ...]] = {
    SplitVit: (VisionTransformer, MiniVit),
    SplitXcit: (Xcit, SimXcit, MiniXcit),
    SplitCvt: (Cvt,),
}
SPLIT: dict[type[nn.Module], type[SplitModel]] = {
    cls: type(f"Split{cls.__name__}", (split, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    for split, classes in FAMILIES.items()
    for cls in classes
}
globals().update({cls.__name__: cls for cls in SPLIT.values()})  # pickle finds a class by module and name
# The modules that may be in such a model: those whose forward is known, and tokenwise ones with parameters.
BLOCKS = (Block, LocalBlock, XCABlock, BlockWithoutLpi, ClassAttentionBlock, cvt.Block)
EMBEDDINGS = (PatchEmbed, ProductPatchEmbed, ConvPatchEmbed, ConvStem, cvt.ConvEmbedding)
SPATIAL = (nn.Conv2d, PatchConv2d, nn.BatchNorm2d)
TOKENWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, RmsNorm, SimpleNorm, LayerScale, FeatureMap)


def parallelize(model: nn.Module, mesh: Group) -> nn.Module:
    """The same model, changed in place: each process of the mesh computes some rows of every image.

    Every process calls the model with the same whole images and gets the same logits. Patch embedding and everything
    after it run on the rows of the process; attention adds up its sums, and convolutions read the rows of their
    neighbors. Logits and gradients equal those of the model in one process.

    The gradients of a process are its part. Where every process computes the same loss, their average over the
    processes, as DistributedDataParallel and FSDP compute it, is the gradient of the model in one process.

    Names of parameters and the state_dict stay, so checkpoints load in both directions.

    Args:
        model: A ViT, XCiT or CvT with SimA attention: of this package, or of timm after `convert(model)`.
        mesh: The processes: a DeviceMesh with one dimension or one named "sequence", or a ProcessGroup.

    Raises:
        ValueError: The model, or one of its modules, cannot be split. The model is left as it was.
    """
    group = _sequence_mesh(mesh)
    if group.size() == 1:
        return model
    if isinstance(model, SplitModel):
        if model.group.get_group() is not group.get_group():
            raise ValueError("the model is parallelized over other processes already: call unparallelize(model) first")
        return model
    check_model(model)
    model.__class__ = SPLIT[type(model)]
    split: Any = model
    split.group = group
    split.split()
    return model


def unparallelize(model: nn.Module) -> nn.Module:
    """The model of one process again, changed in place: the inverse of `parallelize`."""
    if isinstance(model, SplitModel):
        model.unsplit()
    return model


def _sequence_mesh(mesh: Group) -> DeviceMesh:
    """The mesh with one dimension that splits the tokens; modules with a mesh can be copied, those with a group not."""
    if not isinstance(mesh, DeviceMesh):
        members = process_group(mesh)  # an error for everything else
        return DeviceMesh.from_group(members, "cuda" if dist.get_backend(members) == "nccl" else "cpu")
    if mesh.ndim == 1:
        return mesh
    if SEQUENCE not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"mesh has the dimensions {mesh.mesh_dim_names}, and none is named {SEQUENCE!r}; name the one that splits "
            f"the tokens {SEQUENCE!r}, or select it"
        )
    # Not mesh["sequence"]: with torch 2.15 that keeps the threads of gloo alive until the process ends.
    return DeviceMesh.from_group(mesh.get_group(SEQUENCE), mesh.device_type)


def check_model(model: nn.Module) -> None:
    """Raise unless `parallelize` can split the model; the error names the first modules in the way."""
    if type(model) not in SPLIT:
        known = ", ".join(cls.__name__ for cls in SPLIT)
        raise ValueError(
            f"parallelize does not support {type(users_model(model)).__name__}; supported: {known}, of this "
            "package and of timm, not wrapped by other modules"
        )
    settings: Any = model
    if settings.global_pool not in POOLS:
        raise ValueError(
            f"parallelize supports global_pool {' and '.join(map(repr, POOLS))}, and the model has "
            f"{settings.global_pool!r}; build it with one of them"
        )
    parts = [(name, module) for name, module in model.named_modules() if module is not model]
    found = [f"{name} ({type(m).__name__}): {reason}" for name, m in parts if (reason := _reason(name, m))]
    if found:
        more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError("these modules cannot be split over processes:\n  " + "\n  ".join(found[:5]) + more)


def _reason(name: str, module: nn.Module) -> str | None:
    """Why a module cannot work on some of the rows; None if it can."""
    if name.endswith("attn") or looks_like_attention(module):
        return _attention_reason(module)
    if isinstance(module, PatchDropout):
        return "it drops other patches on each process; build the model with patch_drop_rate=0"
    known: tuple[type[nn.Module], ...] = ()
    if name.endswith("patch_embed"):
        known = EMBEDDINGS
    elif "Block" in type(module).__name__:
        known = BLOCKS
    elif isinstance(module, SPATIAL):
        known = SPATIAL
    elif isinstance(module, LocalValues | Rotation):
        unknown = module.image_grid is None
        return "it does not know the grid of an image; call sima_attn.nn.follow_image_grid(model)" if unknown else None
    elif any(True for _ in module.parameters(recurse=False)):
        known = (*TOKENWISE, cvt.Stage)
        if isinstance(module, known):
            return None
    if known and type(module) not in known:
        return "parallelize does not know whether it can work on some of the rows"
    return conv_reason(module) if isinstance(module, nn.Conv2d) else None


def _attention_reason(module: Any) -> str | None:
    if isinstance(module, SimClassAttention):
        return None
    if not isinstance(module, SimAttention | Relu2Attention):
        return "it cannot add up its tokens over processes; call convert(model) for SimA attention first"
    norm = getattr(module, "norm_over_tokens", "l1")
    if norm != "l1" or module.order == "qk":
        return f"it has norm={norm!r}, order={module.order!r}; use norm='l1', order='auto'"
    return None
