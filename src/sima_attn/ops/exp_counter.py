"""Counts the exp-like functions a computation really evaluates, element by element.

"Exp-like" is every function whose hardware form needs an exponential (or a table of one): exp itself,
softmax, sigmoid, tanh, erf, and the activations made of them. Softmax attention that runs as one fused
kernel counts with the N x M exponentials inside it. Not counted: powers of
a number (in vision models they make tables of position encodings, constants at a fixed size), and what fused
recurrent layers (LSTM, GRU) do inside.
"""

from collections import Counter
from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _of_input(args: tuple) -> int:
    return args[0].numel()


def _of_scores(args: tuple) -> int:
    """q [B, H, N, D] and k [B, H, M, D]: one exp for each of the B*H*N*M scores."""
    q, k = args[:2]
    return q.numel() // q.shape[-1] * k.shape[-2]


_FUNCTIONS = """
    exp exp2 expm1 softmax _softmax log_softmax _log_softmax _safe_softmax logsumexp _logcumsumexp logaddexp logaddexp2
    sigmoid log_sigmoid_forward tanh sinh cosh erf erfc erfinv special_erfcx special_ndtri special_log_ndtr
    gelu elu celu selu silu mish softplus glu
""".split()
_FUSED_ATTENTIONS = """
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
""".split()

# aten operation -> (the name a person knows it by, how many numbers it is evaluated on)
EXP_LIKE: dict[str, tuple[str, Callable[[tuple], int]]] = {
    **{name: (name.strip("_"), _of_input) for name in _FUNCTIONS},
    **{name + "_": (name, _of_input) for name in _FUNCTIONS if not name.startswith("_")},  # in-place forms
    **dict.fromkeys(_FUSED_ATTENTIONS, ("scaled_dot_product_attention", _of_scores)),
}


class ExpCounter(TorchDispatchMode):
    """Context manager whose `counts` maps each exp-like function to the numbers it was evaluated on.

    Example:
        ```python
        with ExpCounter() as counter:
            model(image)
        counter.total, counter.counts  # 2794248, Counter({'scaled_dot_product_attention': 2794248})
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All exp-like evaluations together."""
        return self.counts.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        entry = EXP_LIKE.get(func.overloadpacket.__name__)
        if entry is not None and isinstance(args[0], Tensor):
            name, count = entry
            self.add(name, count(args))
        return func(*args, **(kwargs or {}))

    def add(self, name: str, count: int) -> None:
        """Note one call; a subclass may note more, such as the module that runs."""
        self.counts[name] += count
