"""Every attention of the registry once more: plain NumPy, one query at a time, in float64.

Written from the papers' formulas alone, so that a slip in the package cannot hide in its own reference.
Each function takes the module (for its learned or random parts) and q, k, v [N, D] of one head.
"""

import math

import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def weigh(weights, v):
    """Each row of the output is the sum of the values with that row of weights."""
    return np.stack([sum(w * value for w, value in zip(row, v, strict=True)) for row in weights])


def sima(module, q, k, v, head):
    q = np.stack([channel / max(np.abs(channel).sum(), 1e-12) for channel in q.T], 1)
    k = np.stack([channel / max(np.abs(channel).sum(), 1e-12) for channel in k.T], 1)
    return weigh([[qi @ kj for kj in k] for qi in q], v)


def conv3x3(module, v, head):
    """One 3 x 3 filter per channel over a square grid of tokens, zeros around it; one number at a time."""
    side, D = math.isqrt(len(v)), v.shape[1]
    filters = module.local.weight.detach().double().numpy()[head * D : (head + 1) * D, 0]  # [D, 3, 3]
    out = np.zeros_like(v)
    for row in range(side):
        for column in range(side):
            for down in (-1, 0, 1):
                for across in (-1, 0, 1):
                    if 0 <= row + down < side and 0 <= column + across < side:
                        neighbor = v[(row + down) * side + column + across]
                        out[row * side + column] += filters[:, down + 1, across + 1] * neighbor
    return out


def sima_local(module, q, k, v, head):
    gain = module.gain.detach().double().numpy()[head]
    return gain * len(q) * sima(module, q, k, v, head) + conv3x3(module, v, head)


def relu2(module, q, k, v, head):
    rows = []
    for qi in q:
        weights = np.array([np.mean(np.maximum(qi, 0) ** 2 * np.maximum(kj, 0) ** 2) for kj in k])
        rows.append(weights / max(weights.sum(), 1e-6))
    return weigh(rows, v) + conv3x3(module, v, head)


def relu2_wide(module, q, k, v, head):
    maps = [
        (part.weight[head].detach().double().numpy(), part.bias[head].detach().double().numpy())
        for part in (module.q_map, module.k_map)
    ]
    (a, b), (c, d) = maps
    return relu2(module, q @ a + b, k @ c + d, v, head)


def rotated(x, base=50.0):
    """Complex numbers x_2i + j x_2i+1 of a square grid of tokens, turned by the row (first half) or the column."""
    N, D = x.shape
    side = math.isqrt(N)
    out = np.empty_like(x)
    for token in range(N):
        for i in range(D // 2):
            place = token // side if i < D // 4 else token % side
            angle = place * base ** (-4 * (i % (D // 4)) / D)
            turned = complex(x[token, 2 * i], x[token, 2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
            out[token, 2 * i : 2 * i + 2] = turned.real, turned.imag
    return out


def sima_rope(module, q, k, v, head):
    return len(q) / q.shape[1] * sima(module, rotated(q), rotated(k), v, head) + conv3x3(module, v, head)


def relu2_rope(module, q, k, v, head):
    return relu2(module, rotated(q), rotated(k), v, head)


def softmax_attention(module, q, k, v, head):
    return weigh([softmax(np.array([qi @ kj for kj in k]) / math.sqrt(q.shape[1])) for qi in q], v)


def softmax_local(module, q, k, v, head):
    return softmax_attention(module, q, k, v, head) + conv3x3(module, v, head)


def softmax_rope(module, q, k, v, head):
    return softmax_local(module, rotated(q), rotated(k), v, head)


def xca(module, q, k, v, head):
    tau = module.temperature.detach().double().numpy()[head].item()
    q = np.stack([channel / np.linalg.norm(channel) for channel in q.T])  # [D, N]
    k = np.stack([channel / np.linalg.norm(channel) for channel in k.T])
    mixing = np.stack([softmax(tau * np.array([qc @ kc for kc in k])) for qc in q])  # [D, D]
    return np.stack([mixing @ token for token in v])


def elu(module, q, k, v, head):
    def phi(x):
        return np.where(x > 0, x + 1, np.exp(x))

    rows = []
    for qi in phi(q):
        weights = np.array([qi @ kj for kj in phi(k)])
        rows.append(weights / (weights.sum() + 1e-6))
    return weigh(rows, v)


def efficient(module, q, k, v, head):
    k = softmax(k, axis=0)
    return weigh([[softmax(qi) @ kj for kj in k] for qi in q], v)


def cosformer(module, q, k, v, head):
    rows = []
    for qi in np.maximum(q, 0):
        weights = np.array([qi @ kj for kj in np.maximum(k, 0)])
        rows.append(weights / max(weights.sum(), 1e-6))
    return weigh(rows, v)


def cosformer_2d(module, q, k, v, head):
    side = math.isqrt(len(q))
    rows = []
    for i, qi in enumerate(q):
        weights = []
        for j, kj in enumerate(k):
            down, across = i // side - j // side, i % side - j % side
            near = math.cos(math.pi / 2 * down / side) * math.cos(math.pi / 2 * across / side)
            weights.append(np.maximum(qi, 0) @ np.maximum(kj, 0) * near)
        rows.append(np.array(weights) / max(sum(weights), 1e-6))
    return weigh(rows, v)


def gaussian(x, y):
    scale = x.shape[1] ** -0.25
    return np.array([[math.exp(-0.5 * ((xi - yj) * scale) @ ((xi - yj) * scale)) for yj in y] for xi in x])


def soft_full(module, q, k, v, head):
    return weigh(gaussian(q, k), v)


def soft(module, q, k, v, head):
    ratio, side = module.ratio, math.isqrt(len(q))
    weight = module.landmark_conv.weight.detach().double().numpy()  # [D, D, ratio, ratio]
    gain, bias = (p.detach().double().numpy() for p in (module.landmark_norm.weight, module.landmark_norm.bias))
    maps = q.reshape(side, side, -1)
    landmarks = []
    for top in range(0, side - ratio + 1, ratio):
        for left in range(0, side - ratio + 1, ratio):
            patch = maps[top : top + ratio, left : left + ratio]  # [ratio, ratio, D]
            x = np.einsum("oirc,rci->o", weight, patch)
            x = (x - x.mean()) / math.sqrt(x.var() + module.landmark_norm.eps) * gain + bias
            landmarks.append([0.5 * xi * (1 + math.erf(xi / math.sqrt(2))) for xi in x])
    landmarks = np.array(landmarks)
    P = gaussian(landmarks, landmarks)
    inverse = np.linalg.inv(P + 0.01 * np.eye(len(P)))
    return gaussian(q, landmarks) @ inverse @ gaussian(k, landmarks).T @ v


def linformer(module, q, k, v, head):
    E, F = (p.detach().double().numpy() for p in (module.project_k, module.project_v))
    return softmax_attention(module, q, E @ k, F @ v, head)


def performer(module, q, k, v, head):
    directions = module.directions.double().numpy()
    q, k = q * q.shape[1] ** -0.25, k * k.shape[1] ** -0.25

    def exponents(x):
        return np.array([[w @ xi - xi @ xi / 2 for w in directions] for xi in x])

    eq, ek = exponents(q), exponents(k)
    phi_q = (np.exp(eq - eq.max(1, keepdims=True)) + 1e-4) / math.sqrt(len(directions))
    phi_k = (np.exp(ek - ek.max()) + 1e-4) / math.sqrt(len(directions))
    weights = phi_q @ phi_k.T
    return weigh(weights / (weights.sum(1, keepdims=True) + 1e-6), v)


def nystrom(module, q, k, v, head):
    m = min(module.num_landmarks, len(q))
    runs = np.array_split(np.arange(len(q)), m)  # the longer runs come first
    q_marks, k_marks = (np.stack([x[run].mean(0) for run in runs]) for x in (q, k))
    scale = q.shape[1] ** -0.5
    f1, f2, f3 = softmax(q @ k_marks.T * scale), softmax(q_marks @ k_marks.T * scale), softmax(q_marks @ k.T * scale)
    z, eye = f2.T / f2.sum(0).max(), np.eye(m)
    for _ in range(6):
        z = z @ (13 * eye - f2 @ z @ (15 * eye - f2 @ z @ (7 * eye - f2 @ z))) / 4
    return f1 @ z @ f3 @ v


FORMULAS = {
    "sima": sima,
    "sima_local": sima_local,
    "sima_rope": sima_rope,
    "relu2": relu2,
    "relu2_wide": relu2_wide,
    "relu2_rope": relu2_rope,
    "softmax": softmax_attention,
    "softmax_local": softmax_local,
    "softmax_rope": softmax_rope,
    "softmax_explicit": softmax_attention,
    "xca": xca,
    "elu": elu,
    "efficient": efficient,
    "cosformer": cosformer,
    "cosformer_2d": cosformer_2d,
    "soft": soft,
    "soft_full": soft_full,
    "linformer": linformer,
    "performer": performer,
    "nystrom": nystrom,
}
