"""Writes tests/data/advantage_goldens.json: rewards to advantages with every option, in exact fractions (roots to 50
digits), from the definitions as sums over sets; shares nothing with trainer/algorithms/advantages.cpp. Run by hand when
options are added:
    python3 tests/parity/make_advantage_goldens.py
"""
import decimal
import itertools
import json
import pathlib
import random
from fractions import Fraction

decimal.getcontext().prec = 50


def exact(x):
    return Fraction(x)  # of the double that the test will read


def root(x):  # of a fraction that is not negative
    return Fraction((decimal.Decimal(x.numerator) / decimal.Decimal(x.denominator)).sqrt())


def clipped(a, o):
    if o["clip_low"] is not None and a < exact(o["clip_low"]):
        a = exact(o["clip_low"])
    if o["clip_high"] is not None and a > exact(o["clip_high"]):
        a = exact(o["clip_high"])
    return a


def grpo(rewards, o):
    r = [exact(x) for x in rewards]
    result = []
    for i, own in enumerate(r):
        pool = [x for j, x in enumerate(r) if j != i] if o["leave_one_out"] else list(r)
        if len(r) < 2:
            result.append(Fraction(0))
            continue
        n = len(pool)
        baseline = sum(pool) / n
        second = sum(x * x for x in pool) / n
        variance = second - baseline * baseline
        if o["unbiased"]:
            variance = variance * n / (n - 1) if n > 1 else Fraction(0)
        deviation = root(variance)
        a = own - baseline
        if o["normalize"] and deviation > 0:
            a /= deviation + (exact(1e-6) if o["unbiased"] else 0)
        result.append(clipped(a, o))
    return [float(a) for a in result]


def reinforce_plus_plus(groups, lengths, o):
    """Advantages of tokens: the group's mean off, then whitened over all tokens of the batch, then clipped."""
    flat, weights = [], []
    for rewards, of_group in zip(groups, lengths):
        r = [exact(x) for x in rewards]
        mean = sum(r) / len(r)
        flat += [x - mean if o["minus_baseline"] else x for x in r]
        weights += of_group
    count = sum(weights)
    mean = sum(a * w for a, w in zip(flat, weights)) / count
    variance = sum((a - mean) ** 2 * w for a, w in zip(flat, weights)) / count
    scale = root(max(variance, exact(1e-8)))
    return [float(clipped((a - mean) / scale, o)) for a in flat]


def scaled(reward, s):
    low, high, to_low, to_high = (exact(s[k]) for k in ("source_min", "source_max", "target_min", "target_max"))
    inside = min(max(exact(reward), low), high)
    return float(to_low + (inside - low) * (to_high - to_low) / (high - low))


def shaped(reward, length, truncated, s):
    if s["stop_properly"] is not None:
        return float(exact(reward) * exact(s["stop_properly"])) if truncated else reward
    over = length - (s["longest"] - s["buffer"])
    return float(exact(reward) - (Fraction(over, s["buffer"]) * exact(s["penalty"]) if over > 0 else 0))


def main():
    draw = random.Random(20261122)
    kinds = [
        lambda: float(draw.random() < 0.4),
        lambda: draw.choice([0.0, 0.1, 0.5, 0.7, 1.0]),
        lambda: draw.uniform(-3, 5),
        lambda: draw.uniform(-1e-3, 1e-3) + 1000.0,
    ]
    groups = [[kind() for _ in range(n)] for n in (1, 2, 3, 4, 8, 16) for kind in kinds]
    groups += [[0.7] * 8, [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.1, 0.1, 0.1]]
    options = [
        dict(leave_one_out=a, normalize=b, unbiased=c, clip_low=low, clip_high=high)
        for a, b, c, (low, high) in itertools.product([True, False], [True, False], [True, False],
                                                      [(None, None), (-0.6, 0.9), (None, 0.25), (-0.25, None)])
    ]
    out = dict(
        grpo=[dict(options=o, rewards=g, advantages=grpo(g, o)) for o in options for g in groups],
        reinforce_plus_plus=[], scaling=[], shaping=[])
    for minus, (low, high) in itertools.product([True, False], [(None, None), (-1.0, 1.5)]):
        for kind in kinds:
            batch = [[kind() for _ in range(4)] for _ in range(6)]
            lengths = [[draw.randint(1, 50) for _ in g] for g in batch]
            o = dict(minus_baseline=minus, clip_low=low, clip_high=high)
            out["reinforce_plus_plus"].append(
                dict(options=o, rewards=batch, lengths=lengths, advantages=reinforce_plus_plus(batch, lengths, o)))
    for s in (dict(source_min=0.0, source_max=1.0, target_min=-1.0, target_max=3.0),
              dict(source_min=-0.3, source_max=0.7, target_min=5.0, target_max=-5.0)):
        for _ in range(20):
            reward = draw.uniform(-2, 2)
            out["scaling"].append(dict(options=s, reward=reward, scaled=scaled(reward, s)))
    for s in (dict(longest=100, buffer=20, penalty=2.0, stop_properly=None),
              dict(longest=64, buffer=64, penalty=0.3, stop_properly=None),
              dict(longest=100, buffer=20, penalty=2.0, stop_properly=0.25)):
        for _ in range(20):
            reward, length = draw.uniform(-1, 1), draw.randint(1, 130)
            truncated = length >= s["longest"]
            out["shaping"].append(
                dict(options=s, reward=reward, length=length, truncated=truncated,
                     shaped=shaped(reward, length, truncated, s)))
    path = pathlib.Path(__file__).resolve().parents[1] / "data" / "advantage_goldens.json"
    path.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(path, {k: len(v) for k, v in out.items()}, path.stat().st_size)


main()
