"""The names of all models that the commands take, ours and timm's, listed without importing torch or timm."""

import re
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from sima_attn.models.sizes import CVT, DEIT, MINI_VIT, MINI_XCIT, XCIT

WEIGHTS = Path(__file__).parents[1] / "weights"  # those that come with the package
FAMILIES = {
    **dict.fromkeys(DEIT, "sima_deit"),
    **dict.fromkeys(XCIT, "sima_xcit"),
    **dict.fromkeys(CVT, "sima_cvt"),
    **dict.fromkeys([*MINI_VIT, *MINI_XCIT], "sima_miniature"),
}


def timm_families() -> dict[str, str]:
    """Name -> family of timm's models, read from its source files: importing timm takes seconds.

    A family is one file; a model is a function with the decorator `register_model`.
    """
    timm = find_spec("timm")
    assert timm is not None  # required by the package
    assert timm.origin is not None
    return {
        name: path.stem
        for path in sorted(Path(timm.origin).parent.glob("models/*.py"))
        for name in re.findall(r"^@register_model\ndef (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def matches(name: str, pattern: str) -> bool:
    """Whether a name contains the pattern, or fits it where it has wildcards such as `*`."""
    return fnmatch(name, pattern if re.search(r"[*?[]", pattern) else f"*{pattern}*")


def takes_attention(name: str, attention: str) -> bool:
    """Whether one of our models can be built with an attention of the registry."""
    from sima_attn.models.cvt import unsupported_reason
    from sima_attn.nn import attention_class

    cls = attention_class(attention)
    if name in CVT:
        return unsupported_reason(cls) is None
    return not (cls.needs_grid and name in DEIT)  # their class token is not on the grid
