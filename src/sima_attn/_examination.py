"""What is installed, which devices there are, and whether the operator computes the paper's equations on them.

`examine` returns one `Findings` of plain values; `sima doctor` prints it.
"""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sima_attn._errors import first_line
from sima_attn._install import install_command
from sima_attn._version import __version__

if TYPE_CHECKING:
    import torch

SHAPES = {"kv": (2, 2, 40, 16), "qk": (2, 2, 12, 16)}  # order that "auto" selects -> B, H, N, D
LARGEST_ERROR = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}  # about ten times that of correct kernels


@dataclass(frozen=True)
class Package:
    """A package: the installed version (None if missing) and the required ones."""

    name: str
    version: str | None
    needs: str
    extras: list[str]  # [""]: always required
    verdict: str  # "ok", "missing" or "wrong version"


@dataclass(frozen=True)
class Gpu:
    """A CUDA device, and how SimA runs on it."""

    name: str
    capability: str
    memory_gib: float
    kernels: str


@dataclass(frozen=True)
class Check:
    """sima_attention against the paper's equations in float64: largest error relative to the largest value."""

    device: str
    backend: str
    dtype: str
    error: float | None
    gradient_error: float | None
    verdict: str  # "ok", "wrong", "crashed" or "not here"
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether an available backend is wrong or crashed."""
        return self.verdict in ("wrong", "crashed")


@dataclass
class Findings:
    """The result of the examination, in plain values."""

    sima_attn: str
    python: str
    system: str
    cpu: dict[str, Any]
    cuda: str  # CUDA version of torch, and number of devices
    gpus: list[Gpu]
    packages: list[Package]
    checks: list[Check]
    weights: dict[str, str]  # model -> description
    problems: list[str] = field(default_factory=list)


def examine() -> Findings:
    """Check everything. Writes nothing, and needs no network."""
    import torch

    from sima_attn.report.rows import cpu_name

    packages = installed_packages()
    checks = run_checks()
    weights, problems = shipped_weights()
    problems += [
        f"{p.name} {p.version or 'is missing'}, but sima-attn needs {p.name}{p.needs}: {how_to_install(p.extras)}"
        for p in packages
        if p.verdict == "wrong version" or (p.verdict == "missing" and "" in p.extras)
    ]
    problems += [f"{c.backend} on {c.device}, {c.dtype}: {c.reason}" for c in checks if c.failed]
    # Where a process may use only some of the cores, as in a container.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Findings(
        sima_attn=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu={"name": cpu_name(), "cores": cores, "threads": torch.get_num_threads()},
        cuda=cuda_summary(),
        gpus=[describe_gpu(index) for index in range(torch.cuda.device_count())],
        packages=packages,
        checks=checks,
        weights=weights,
        problems=problems,
    )


def installed_packages() -> list[Package]:
    """All required and optional packages of the distribution, and triton, which comes with torch."""
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    declared = None
    with suppress(PackageNotFoundError):  # a clone that runs without being installed
        declared = requires("sima-attn")
    needs: dict[str, Requirement] = {"triton": Requirement("triton")}
    extras: dict[str, list[str]] = {"triton": ["cuda"]}
    for requirement in map(Requirement, declared or []):
        extra = re.search(r"extra == \"([\w-]+)", str(requirement.marker))
        needs[requirement.name] = requirement
        extras.setdefault(requirement.name, []).append(extra[1] if extra else "")
    packages = []
    for name, requirement in needs.items():
        found = None
        with suppress(PackageNotFoundError):
            found = version(name)
        # A torch built from source, such as 2.12.0a0, is accepted.
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        verdict = "ok" if fits else "missing" if found is None else "wrong version"
        packages.append(Package(name, found, str(requirement.specifier), extras[name], verdict))
    return packages


def how_to_install(extras: list[str]) -> str:
    """The command that installs the packages of one of these extras."""
    if extras == ["cuda"]:
        return "comes with torch's CUDA builds"
    return install_command("" if "" in extras else extras[0])


def cuda_summary() -> str:
    """CUDA version of torch, and number of devices."""
    import torch

    if torch.version.cuda is None:
        return "torch was built without CUDA"
    count = torch.cuda.device_count()
    return f"torch was built for CUDA {torch.version.cuda} and sees {count or 'no'} device{'s' * (count != 1)}"


def describe_gpu(index: int) -> Gpu:
    """A CUDA device: its memory, and whether the fused kernels run on it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    reason = kernels_unsupported_reason(f"cuda:{index}")
    return Gpu(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_gib=round(properties.total_memory / 2**30, 1),
        kernels="fused" if reason is None else f"plain torch: {reason}",
    )


def kernels_unsupported_reason(device: str) -> str | None:
    """Why the fused kernels do not run on a device, or None if they do."""
    import torch

    from sima_attn.ops.triton_support import unsupported_reason

    try:
        return unsupported_reason(*torch.zeros(3, 1, 1, 1, 16, device=device))
    except RuntimeError as error:  # such as a GPU without free memory
        return named_error(error)


def run_checks() -> list[Check]:
    """Check all backends on all devices: attention and gradients, both orders, all dtypes, with padding."""
    import torch

    from sima_attn.ops.api import BACKENDS

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    checks = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # with tf32, plain torch would fail the check
    try:
        for device in devices:
            for backend in BACKENDS[1:]:  # all but "auto"
                reason = kernels_unsupported_reason(device) if backend == "triton" else None
                if reason is not None:
                    checks.append(Check(device, backend, "-", None, None, "not here", reason))
                    continue
                checks += [check_backend(device, backend, dtype) for dtype in LARGEST_ERROR]
    finally:
        torch.set_float32_matmul_precision(precision)
    return checks


def check_backend(device: str, backend: str, dtype: str) -> Check:
    """Run a backend on small inputs and compare it with the paper's equations in float64."""
    import torch

    largest = LARGEST_ERROR[dtype]
    try:
        errors = [order_errors(device, backend, getattr(torch, dtype), order) for order in SHAPES]
    except Exception as error:  # any error of a driver or compiler is reported
        return Check(device, backend, dtype, None, None, "crashed", named_error(error))
    worst = torch.tensor(errors).amax(0)  # of both orders; NaN if one of them is
    if not worst.isfinite().all():
        return Check(device, backend, dtype, None, None, "wrong", "numbers that are not finite")
    forward, gradient = worst[0].item(), worst[1:].max().item()
    if max(forward, gradient) <= largest:
        return Check(device, backend, dtype, forward, gradient, "ok")
    reason = f"off by {forward:.1e}, gradients by {gradient:.1e}; {largest:.0e} is allowed"
    return Check(device, backend, dtype, forward, gradient, "wrong", reason)


def order_errors(device: str, backend: str, dtype: "torch.dtype", order: str) -> list[float]:
    """The errors of the output, computed as in inference, and of the gradients of q, k and v."""
    import torch

    from sima_attn.ops import sima_attention, sima_reference

    B, H, N, D = SHAPES[order]
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = torch.randn(4, B, H, N, D, generator=generator).to(dtype)
    mask = torch.arange(N) < torch.tensor([[N], [N - 5]])  # [B, N], the second image is shorter

    def run(attention: Any, where: str, kind: "torch.dtype", **options: Any) -> "list[torch.Tensor]":
        real = mask.to(where)
        inputs = [t.to(where, kind).requires_grad_() for t in (q, k, v)]
        o = attention(*inputs, key_mask=real, query_mask=real, **options)
        gradients = torch.autograd.grad(o, inputs, weights.to(where, kind))
        with torch.no_grad():  # inference has a separate path on the CPU
            o = attention(*(t.detach() for t in inputs), key_mask=real, query_mask=real, **options)
        return [t.detach().cpu().double() for t in (o, *gradients)]

    got = run(sima_attention, device, dtype, order=order, backend=backend)
    true = run(sima_reference, "cpu", torch.float64)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, true, strict=True)]


def named_error(error: Exception) -> str:
    """An error in one line, with its class."""
    return f"{type(error).__name__}: {first_line(error)}"


def shipped_weights() -> tuple[dict[str, str], list[str]]:
    """Model -> description of its weights; and problems of files that cannot be read."""
    from sima_attn.models.pretrained import WEIGHTS, read_card

    weights: dict[str, str] = {}
    broken: list[str] = []
    for path in sorted(WEIGHTS.glob("*.safetensors")):
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        try:
            card = read_card(path)
            weights[path.stem] = f"{size}, top-1 {card.top1:.1f} on {card.images} images of {card.size} px"
        except Exception as error:  # a truncated or damaged file
            broken.append(f"the weights of {path.stem} cannot be read ({type(error).__name__}): reinstall the package")
    return weights, broken
