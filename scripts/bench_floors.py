#!/usr/bin/env python3
"""bench_floors.py [FILE.json ...]: floors of kept `bench step` results, by today's count of work.

A kept file holds what the program of its day printed. Programs of 22 November 2026 counted a shared prompt once for
each of its responses although it is computed once (trainer/bench/work.h has the count since). This takes such a file's
own ceilings and prints the floors of its passes for log-probs and training anew. Of every file the count is compared:
floors that are neither today's nor those of that day are an error. Without FILE: every one below bench/results.
"""
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MASK = (1 << 32) - 1


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def draw(seed, number, position, stream):
    """trainer/ops/philox.cpp, as the lengths use it: numbers below 2^32."""
    key = philox([number, 0, stream, 0x74726972], [seed, 0])
    bits = philox([position, 0, key[2], key[3]], key[:2])
    return [((bits[i] << 32 | bits[i + 1]) >> 11) * 2.0**-53 for i in (0, 2)]


def normal(seed, number, position):
    first, second = draw(seed, number, position, 1)
    return math.sqrt(-2 * math.log1p(-first)) * math.cos(2 * math.pi * second)


def nearest(value):
    return math.floor(value + 0.5)


def synthetic(text):
    """trainer/rollout/lengths.cpp: prompts and responses of "synthetic:PROMPTSxSAMPLES:mean=M:max=X:seed=S"."""
    parts = text.split(":")
    prompts, samples = map(int, parts[1].split("x"))
    value = {"prompt": 200, "seed": 1, **{k: int(v) for k, v in (part.split("=") for part in parts[2:])}}
    longest, seed = value.get("max", 5 * value["mean"]), value["seed"]
    inputs = [max(1, nearest(value["prompt"] * (0.6 + 0.8 * draw(seed, 0, p, 0)[0]))) for p in range(prompts)]
    draws = [math.exp(0.8 * normal(seed, 1, s)) for s in range(prompts * samples)]
    top = draws.index(max(draws))

    def clipped(scale):
        lengths = [min(max(nearest(scale * each), 1), longest) for each in draws]
        lengths[top] = longest
        return lengths

    low, high = 0.0, longest / min(draws)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < value["mean"] * len(draws) else (low, middle)
    return inputs, clipped(high)


def lengths_of(name):
    if name.startswith("synthetic:"):
        return synthetic(name)
    plain = re.fullmatch(r"(\d+)x(\d+) answers of (\d+) tokens", name)
    if plain:
        prompts, samples, tokens = map(int, plain.groups())
        return [200] * prompts, [tokens] * (prompts * samples)
    data = json.loads((ROOT / name).read_text())
    return data["prompt_lengths"], data["output_lengths"]


def shape(name):
    """vocab, hidden, intermediate, layers, heads, key heads and head dim of trainer/bench/shapes.cpp."""
    text = (ROOT / "trainer/bench/shapes.cpp").read_text()
    return [int(n) for n in re.search(rf'"{re.escape(name)}", \w+::\w+, ((?:\d+, ){{7}})', text)[1].split(",")[:7]]


def forward_flops(sizes, prompts, outputs, share):
    """trainer/bench/work.h; every token of the responses goes through the head."""
    vocab, hidden, intermediate, layers, heads, key_heads, width = sizes
    q, kv, samples = heads * width, key_heads * width, len(outputs) // len(prompts)
    matrices = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * intermediate
    pieces = [(p, 0) for p in prompts] if share else []
    for i, n in enumerate(outputs):
        prompt = prompts[i // samples]
        pieces.append((n - 1, prompt) if share else (prompt + n - 1, 0))
    attention = sum(2 * q * n * (n + 1 + 2 * prefix) for n, prefix in pieces)
    return layers * (2 * matrices * sum(n for n, _ in pieces) + attention) + 2 * hidden * vocab * sum(outputs)


def floors_of(result, share):
    sizes = shape(result["shape"])
    sizes[3] = result["layers"]
    seconds = forward_flops(sizes, *lengths_of(result["lengths"]), share)
    seconds /= result["ranks"] * result["matmul_flops_per_second"]
    return {"logprobs": seconds if result["reference"] else 0.0, "training": 3 * seconds}


def main():
    files = [pathlib.Path(f).resolve() for f in sys.argv[1:]] or sorted((ROOT / "bench/results").rglob("*.json"))
    failed = 0
    print(f"{'as printed, and now:':52} {'logprobs':>15} {'training':>15} {'all':>15}  floor / measured training")
    for path in files:
        result = json.loads(path.read_text())
        if result["benchmark"] != "step":
            continue
        kept, now = result["floors"], floors_of(result, result.get("share_prompts", False))

        def same(floors):
            return all(math.isclose(floors[name], kept[name], rel_tol=1e-9) for name in floors)

        if same(now):
            continue
        name = str(path.relative_to(ROOT / "bench/results"))
        if not same(floors_of(result, False)):
            print(f"{name}: its floors {kept} are of no count known here", file=sys.stderr)
            failed = 1
            continue
        total = kept["generation"] + sum(now.values())
        pairs = [*((kept[phase], now[phase]) for phase in now), (result["floor_seconds"], total)]
        share = now["training"] / result["phases_of_slowest_rank"]["training"]
        early = result.get("gradients_under_generation")  # then the phase has only a part of the training
        print(f"{name:52} {' '.join(f'{a:7.2f} {b:7.2f}' for a, b in pairs)}  {'' if early else f'{share:.0%}'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
