"""Writes tests/data/rope_goldens.json: how fast each pair of a head's elements turns, and cos and sin at some
positions, for every kind of rope scaling. From the definitions (Peng et al. 2023, "YaRN: Efficient Context Window
Extension of Large Language Models"; "The Llama 3 Herd of Models"; linear interpolation: Chen et al. 2023) in 50 digits;
shares nothing with trainer/ops/rope_frequencies.cpp. Run by hand when a kind is added; with transformers there, the
same configurations are also put to it, and a difference is an error:
    python3 tests/parity/make_rope_goldens.py
"""
import decimal
import json
import math
import pathlib
from decimal import Decimal

decimal.getcontext().prec = 50
PI = Decimal("3.14159265358979323846264338327950288419716939937511")


def cosine(x):
    """By the series, of an angle brought below pi."""
    x = x % (2 * PI)
    term, total, n = Decimal(1), Decimal(0), 0
    while abs(term) > Decimal(10) ** -40:
        total += term
        n += 2
        term = -term * x * x / (n * (n - 1))
    return total


def sine(x):
    return cosine(x - PI / 2)


def power(base, exponent):
    return (exponent * Decimal(base).ln()).exp()


def yarn(rope, plain, pair, dim):
    theta, scale = Decimal(rope["rope_theta"]), Decimal(rope["factor"])
    length = Decimal(rope["original_max_position_embeddings"])

    def pair_of(rotations):  # the one that turns so often over the original length
        # length * theta^(-2 pair / dim) = 2 pi rotations
        return dim * (length / (2 * PI * Decimal(rotations))).ln() / (2 * theta.ln())

    first, last = pair_of(rope.get("beta_fast", 32)), pair_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = first.to_integral_value(decimal.ROUND_FLOOR), last.to_integral_value(decimal.ROUND_CEILING)
    first, last = max(first, Decimal(0)), min(last, Decimal(dim - 1))
    if first == last:
        last += Decimal("0.001")
    interpolated = min(max((pair - first) / (last - first), Decimal(0)), Decimal(1))
    return plain * (1 - interpolated) + plain / scale * interpolated


def llama3(rope, plain):
    factor, low, high = Decimal(rope["factor"]), Decimal(rope["low_freq_factor"]), Decimal(rope["high_freq_factor"])
    turns = Decimal(rope["original_max_position_embeddings"]) * plain / (2 * PI)  # over the original length
    if turns < low:
        return plain / factor
    if turns > high:
        return plain
    kept = (turns - low) / (high - low)
    return plain * kept + plain / factor * (1 - kept)


def frequency(rope, pair, dim):
    plain = power(rope["rope_theta"], -Decimal(2 * pair) / dim)
    kind = rope["rope_type"]
    if kind == "linear":
        return plain / Decimal(rope["factor"])
    if kind == "llama3":
        return llama3(rope, plain)
    if kind == "yarn":
        return yarn(rope, plain, Decimal(pair), dim)
    return plain  # default, and dynamic up to the model's own length


def attention_factor(rope):
    if rope["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in rope:
        return rope["attention_factor"]

    def of(mscale):
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return of(rope["mscale"]) / of(rope["mscale_all_dim"])
    return of(1.0)


CASES = [
    (128, 40960, {"rope_type": "default", "rope_theta": 1000000.0}),
    (64, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    (128, 4096, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    (128, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    (128, 40960, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                  "original_max_position_embeddings": 32768}),
    (128, 32768, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4096,
                  "beta_fast": 16.0, "beta_slow": 2.0}),
    (64, 8192, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.5, "original_max_position_embeddings": 2048,
                "attention_factor": 1.5}),
    (64, 163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
                  "mscale": 1.0, "mscale_all_dim": 0.7}),
    (128, 131072, {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                   "original_max_position_embeddings": 4096, "truncate": False}),
    (16, 64, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 64}),
]
POSITIONS = [0, 1, 63, 1000, 4095, 32767, 131071]


def reach(max_position, rope):
    if rope["rope_type"] == "yarn":
        return max(max_position, rope["factor"] * rope["original_max_position_embeddings"])
    return max_position * (rope["factor"] if rope["rope_type"] == "linear" else 1)


def check_with_transformers(head_dim, max_position, rope, frequencies):
    try:
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
    except ImportError:
        return False
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_position, rope_parameters=dict(rope))
    theirs = Qwen3RotaryEmbedding(config)
    for mine, other in zip(frequencies, theirs.inv_freq.tolist(), strict=True):
        if abs(mine - other) > 1e-6 * abs(other):
            raise SystemExit(f"{rope}: {mine} here, {other} in transformers")
    if abs(theirs.attention_scaling - attention_factor(rope)) > 1e-9:
        raise SystemExit(f"{rope}: attention factor {attention_factor(rope)} here, {theirs.attention_scaling} there")
    return True


def main():
    cases, compared = [], 0
    for head_dim, max_position, rope in CASES:
        frequencies = [frequency(rope, pair, head_dim) for pair in range(head_dim // 2)]
        compared += check_with_transformers(head_dim, max_position, rope, [float(f) for f in frequencies])
        scale = attention_factor(rope)
        table = [{"position": p, "cos": [round(float(cosine(p * f)) * scale, 10) for f in frequencies],
                  "sin": [round(float(sine(p * f)) * scale, 10) for f in frequencies]}
                 for p in POSITIONS if p < reach(max_position, rope)]
        cases.append({"head_dim": head_dim, "max_position_embeddings": max_position, "rope": rope,
                      "frequencies": [float(f) for f in frequencies], "table": table})
    path = pathlib.Path(__file__).resolve().parents[1] / "data" / "rope_goldens.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(f"{path}: {len(cases)} cases; transformers agrees with {compared}")


if __name__ == "__main__":
    main()
