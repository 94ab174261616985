"""Writes tests/data/value_goldens.json: rewards of tokens, generalized advantages, returns, whitening, and PPO's value
loss with its gradient and moments, float64, from the definitions: sums over the tokens that follow, not recursions.
Shares nothing with trainer/algorithms/advantages.cpp and loss.cpp. Run by hand when options are added:
    python3 tests/parity/make_value_goldens.py
"""
import itertools
import json
import math
import pathlib
import random
import struct


def single(x):
    """The float32 nearest to x: values come from a model in float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def kl_of(logprob, reference, kind):
    x = max(-20.0, min(20.0, reference - logprob))
    kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]
    return max(-10.0, min(10.0, kl))


def discounted(deltas, factor):
    """For each place the sum of what follows, itself included, weighted by powers of the factor."""
    return [math.fsum(factor**k * d for k, d in enumerate(deltas[i:])) for i in range(len(deltas))]


def estimate(sample, o):
    """Advantages (not whitened), returns and rewards of one response."""
    n = len(sample["mask"])
    valid = [t for t in range(n) if sample["mask"][t]]  # the others are no steps in time
    rewards = [0.0] * n
    for t in valid:
        if o["penalty"]:
            rewards[t] -= o["penalty"] * kl_of(sample["logprobs"][t], sample["reference"][t], o["kl"])
        if t == valid[-1]:
            rewards[t] += sample["reward"]
    advantages, returns = [0.0] * n, [0.0] * n
    values = [sample["values"][t] for t in valid]
    after = values[1:] + [0.0]
    deltas = [rewards[t] + o["gamma"] * v1 - v0 for t, v0, v1 in zip(valid, values, after)]
    if o["alpha"] > 0:
        of_policy = 1 - 1 / max(1.0, o["alpha"] * len(valid))
    else:
        of_policy = o["lambda"] if o["lambda_policy"] is None else o["lambda_policy"]
    of_value = o["lambda"] if o["lambda_value"] is None else o["lambda_value"]
    for t, a, r, v in zip(valid, discounted(deltas, o["gamma"] * of_policy), discounted(deltas, o["gamma"] * of_value),
                          values):
        advantages[t], returns[t] = a, r + v
    return advantages, returns, rewards


def whitened(batch, masks):
    flat = [a for row, mask in zip(batch, masks) for a, m in zip(row, mask) if m]
    if not flat:
        return [[0.0] * len(row) for row in batch]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((a - mean)**2 for a in flat) / (len(flat) - 1) if len(flat) > 1 else 0.0
    scale = 1 / math.sqrt(variance + 1e-8)
    return [[(a - mean) * scale if m else 0.0 for a, m in zip(row, mask)] for row, mask in zip(batch, masks)]


def draw_batch(draw, kind):
    """Responses with every token in the loss, with gaps, of one token, with none at all; equal rewards."""
    lengths = {"plain": [5, 1, 9, 3], "gaps": [7, 4, 6, 1], "one": [1], "equal": [4, 4, 4], "none": [3, 2]}[kind]
    batch = []
    for n in lengths:
        mask = [1] * n
        if kind == "gaps":
            mask = [draw.randint(0, 1) for _ in range(n)]
        if kind == "none":
            mask = [0] * n
        batch.append(
            dict(mask=mask, values=[single(draw.uniform(-1, 2)) for _ in range(n)],
                 logprobs=[single(-3 * draw.random() - 0.05) for _ in range(n)],
                 reference=[single(-3 * draw.random() - 0.05) for _ in range(n)],
                 reward=1.0 if kind == "equal" else draw.choice([0.0, 1.0, draw.uniform(-2, 2)])))
    if kind == "gaps":  # the last token, and all of a response
        batch[0]["mask"] = [0, 1, 1, 0, 0, 1, 0]
        batch[1]["mask"] = [0, 0, 0, 0]
    if kind == "plain":
        batch[2]["reference"][0] = single(batch[2]["logprobs"][0] - 40)  # both clamps
        batch[2]["reference"][1] = single(batch[2]["logprobs"][1] + 3)
    return batch


def value_loss(case):
    """Loss, gradient and moments, token by token."""
    tokens = case["global_valid_tokens"]
    n = tokens + 1e-8  # of the loss, as NeMo-RL has it
    e = case["cliprange"]
    loss, gradient, clipped_more = [], [], 0
    for v, old, r, m in zip(case["values"], case["old_values"], case["returns"], case["mask"]):
        square, slope = (v - r)**2, 2 * (v - r)
        if e:
            inside = old - e <= v <= old + e
            c = min(max(v, old - e), old + e)
            if (c - r)**2 > square:
                square, slope = (c - r)**2, (2 * (c - r) if inside else 0.0)
                clipped_more += m
        loss.append(square * m)
        gradient.append(0.5 * case["scale"] * slope * m / n)
    mean = lambda f: math.fsum(f(v, r) * m for v, r, m in zip(case["values"], case["returns"], case["mask"])) / tokens
    picked = [v for v, m in zip(case["values"], case["mask"]) if m]
    return dict(loss=0.5 * case["scale"] * math.fsum(loss) / n, gradient=gradient, vf_clipfrac=clipped_more / tokens,
                values_mean=mean(lambda v, r: v), returns_mean=mean(lambda v, r: r),
                returns_sq_mean=mean(lambda v, r: r * r), residual_sq_mean=mean(lambda v, r: (r - v)**2),
                values_min=min(picked) if picked else None, values_max=max(picked) if picked else None)


def explained(values, returns):
    """1 - Var(R - V) / Var(R), as variances about their own means."""
    n = len(values)
    mean = lambda x: math.fsum(x) / n
    variance = lambda x: mean([(a - mean(x))**2 for a in x])
    return 1 - variance([r - v for v, r in zip(values, returns)]) / max(variance(returns), 1e-8)


def main():
    draw = random.Random(20261125)
    out = dict(gae=[], value_loss=[], explained_variance=[])
    settings = [
        dict(zip(("lambda", "gamma", "lambda_value", "lambda_policy", "alpha"), s))
        for s in [(0.95, 1.0, None, None, 0.0), (1.0, 1.0, None, None, 0.0), (0.0, 0.9, None, None, 0.0),
                  (0.9, 0.97, 1.0, None, 0.0), (0.9, 0.97, None, 0.5, 0.0), (0.95, 1.0, 1.0, 0.8, 0.0),
                  (0.95, 1.0, 1.0, None, 0.05), (0.95, 0.99, 1.0, 0.3, 0.5)]
    ]
    for kind, s, (penalty, kl) in itertools.product(["plain", "gaps", "one", "equal", "none"], settings,
                                                    [(0.0, "k1"), (0.1, "k1"), (0.1, "k2"), (0.2, "k3")]):
        batch, o = draw_batch(draw, kind), dict(s, penalty=penalty, kl=kl)
        made = [estimate(sample, o) for sample in batch]
        advantages = [m[0] for m in made]
        out["gae"].append(
            dict(options=o, kind=kind, batch=batch, advantages=advantages, returns=[m[1] for m in made],
                 rewards=[m[2] for m in made], whitened=whitened(advantages, [b["mask"] for b in batch])))
    for tokens, scale, cliprange in itertools.product([1, 12, 40], [1.0, 0.4], [None, 0.0, 0.2, 0.5]):
        case = dict(scale=scale, cliprange=cliprange,
                    values=[draw.uniform(-2, 2) for _ in range(tokens)],
                    returns=[draw.uniform(-1, 1) for _ in range(tokens)],
                    mask=[1.0 if tokens == 1 or draw.random() < 0.8 else 0.0 for _ in range(tokens)])
        case["old_values"] = [v + draw.uniform(-1, 1) for v in case["values"]]
        case["global_valid_tokens"] = sum(case["mask"]) + 3  # other micro-batches hold 3
        out["value_loss"].append(dict(case, **value_loss(case)))
    for spread in (1.0, 1e-3, 0.0):
        returns = [0.7 + spread * draw.uniform(-1, 1) for _ in range(30)]
        values = [r + draw.uniform(-0.3, 0.5) for r in returns]
        out["explained_variance"].append(dict(values=values, returns=returns, expected=explained(values, returns)))
    path = pathlib.Path(__file__).resolve().parents[1] / "data" / "value_goldens.json"
    path.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(path, {k: len(v) for k, v in out.items()}, path.stat().st_size)


main()
