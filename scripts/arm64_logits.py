"""Logits of an ONNX file on fixed random input, for arm64_check.sh. Needs numpy and onnxruntime only.

usage: arm64_logits.py FILE.onnx OUT.npy
       arm64_logits.py --compare FILE.onnx HERE.npy THERE.npy
"""

import platform
import sys

import numpy as np

LARGEST_ERROR = {"fp32": 1e-4, "int8": 2e-2}  # rounding of a byte may fall to the other side


def logits(path: str) -> np.ndarray:
    """The output for one random input; open sizes are what the file says it was made at."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (only,) = session.get_inputs()
    facts = session.get_modelmeta().custom_metadata_map
    height, width = map(int, facts["sima_attn.input_size"].split("x"))
    sizes = {"batch": 1, "height": height, "width": width}
    shape = [sizes[size] if isinstance(size, str) else size for size in only.shape]
    draw = np.random.default_rng(0)
    if only.type == "tensor(uint8)":
        return session.run(None, {only.name: draw.integers(0, 256, shape, dtype=np.uint8)})[0]
    return session.run(None, {only.name: draw.standard_normal(shape, dtype=np.float32)})[0]


def precision_of(path: str) -> str:
    """fp32 or int8, as the file says."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.get_modelmeta().custom_metadata_map.get("sima_attn.precision", "fp32")


def main(arguments: list[str]) -> int:
    """Run or compare; 1 where the two machines differ."""
    if arguments[:1] == ["--compare"] and len(arguments) == 4:
        path, here, there = arguments[1], np.load(arguments[2]), np.load(arguments[3])
        error = float(np.abs(here - there).max() / np.abs(here).max())
        right = error <= LARGEST_ERROR[precision_of(path)] and here.argmax() == there.argmax()
        print(f"{path}: arm64 differs by {error:.1e} of the largest logit: {'right' if right else 'WRONG'}")
        return 0 if right else 1
    if len(arguments) == 2 and not arguments[0].startswith("-"):
        np.save(arguments[1], logits(arguments[0]))
        print(f"{arguments[0]} ran on {platform.machine()}")
        return 0
    print(__doc__)
    return 0 if arguments[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
