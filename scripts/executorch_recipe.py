"""Model -> ExecuTorch file for XNNPACK, run once and compared with torch. Called by executorch_recipe.sh.

usage: executorch_recipe.py MODEL OUT.pte SIZE
"""

import sys
import time
from collections import Counter
from pathlib import Path

LARGEST_ERROR = 1e-4
NOT_COMPUTING = ("executorch_call_delegate", "getitem", "alloc")


def main(arguments: list[str]) -> int:
    """Write the file; 1 where what it computes is not what torch computes."""
    if len(arguments) != 3:
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    import timm
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    import sima_attn  # noqa: F401  registers our names with timm
    from sima_attn.models.pretrained import weights_file

    name, out, size = arguments[0], Path(arguments[1]), int(arguments[2])
    torch.manual_seed(0)
    shipped = weights_file(name).is_file()
    model = timm.create_model(name, pretrained=shipped).eval()
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        truth = model(images)
        program = torch.export.export(model, (images,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(lowered.buffer)
    calls = [node.target for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    outside = Counter(str(call) for call in calls if not any(word in str(call) for word in NOT_COMPUTING))

    method = Runtime.get().load_program(out).load_method("forward")
    logits = method.execute([images])[0]
    error = float((logits - truth).abs().max() / truth.abs().max())
    start = time.perf_counter()
    for _ in range(10):
        method.execute([images])
    milliseconds = (time.perf_counter() - start) * 100
    weights = "those of the package" if shipped else "random"
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, weights: {weights}, {milliseconds:.1f} ms an image")
    left = ", ".join(f"{count} {name}" for name, count in outside.most_common()) or "nothing"
    print(f"outside XNNPACK, in plain kernels: {left}")
    print(f"differs from torch by {error:.1e} of the largest logit: {'right' if error <= LARGEST_ERROR else 'WRONG'}")
    return 0 if error <= LARGEST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
