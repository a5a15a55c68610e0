"""image -> logits or feature maps: the model families, and a name, a run folder or a file -> a model.

cvt, deit, miniature, xcit    the families, registered with timm when timm is imported
sizes, names                  their sizes; the names of all models, ours and timm's
settings, building            the settings of a model; settings -> the model
loading                       anything a user calls a model -> the model
saving                        a model in memory -> a folder that loading takes
preprocessing                 how a photo becomes an input
huggingface, image_processor  models of transformers with timm's interface; their image processors
weight_files, sharded_files   files and folders of weights -> tensors
weights, pretrained           names of the official code -> ours; the weights that come with the package
patch_embed, compiled         a faster patch embedding on GPUs; torch.compile for equal blocks
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sima_attn.models.weights import LoadReport, load_official, save_official

__all__ = ["LoadReport", "load_official", "save_official"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'sima_attn.models' has no attribute {name!r}")
    from sima_attn.models import weights  # imports torch and timm, which settings and preprocessing do without

    return getattr(weights, name)
