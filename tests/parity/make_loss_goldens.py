"""Writes tests/data/loss_goldens.json: loss and gradient of every option of the policy loss, float64, computed on
padded [sequences, tokens] arrays by code that shares nothing with trainer/algorithms/loss.cpp. Run by hand when options
are added:
    python3 tests/parity/make_loss_goldens.py
"""
import itertools
import json
import pathlib

import torch

torch.set_default_dtype(torch.float64)
LENGTHS = [5, 1, 7, 3]
SEQUENCE_MASK = [1.0, 1.0, 1.0, 0.0]


def inputs(seed):
    g = torch.Generator().manual_seed(seed)
    n, t = len(LENGTHS), max(LENGTHS)
    pad = torch.zeros(n, t)
    for i, length in enumerate(LENGTHS):
        pad[i, :length] = SEQUENCE_MASK[i]
    base = -3 * torch.rand(n, t, generator=g) - 0.05
    near = lambda scale: base + scale * torch.randn(n, t, generator=g)
    data = dict(current=near(0.4), previous=near(0.3), generation=near(0.3), reference=near(0.6))
    data["advantages"] = torch.randn(n, 1, generator=g).expand(n, t).clone()
    data["positive"] = torch.tensor([1.0, 0.0, 1.0, 0.0]).unsqueeze(1).expand(n, t).clone()
    data["mask"] = pad
    return data


def loss_of(d, o):
    mask, seq = d["mask"], torch.tensor(SEQUENCE_MASK)
    cur, prev, gen, ref, adv = d["current"], d["previous"], d["generation"], d["reference"], d["advantages"]
    tokens, seqs = mask.sum() + 3.0, seq.sum() + 1.0  # other micro-batches hold 3 tokens and 1 sequence
    per_seq = mask.sum(1).clamp(min=1)
    tok_mean = lambda x: (x * mask).sum() / (tokens + 1e-8)
    red = tok_mean if o["token_level_loss"] else (lambda x: (((x * mask).sum(1) / per_seq) * seq).sum() / (seqs + 1e-8))
    if o["force_on_policy_ratio"]:
        prev = cur.detach()
    diff = cur - prev
    if o["sequence_level_ratios"]:
        diff = ((diff * mask).sum(1) / per_seq).unsqueeze(1).expand_as(diff)
    r = cur if o["disable_ppo_ratio"] else diff.exp()
    rc = cur if o["disable_ppo_ratio"] else r.clamp(1 - o["clip_min"], 1 + o["clip_max"])
    if o["cispo"]:
        l = -adv * rc.detach() * cur
    else:
        l = torch.max(-adv * r, -adv * rc)
        if o["clip_c"] is not None:
            l = torch.where(adv < 0, torch.min(l, -adv * o["clip_c"]), l)
    if o["importance_sampling_correction"]:
        lw = (prev - gen).detach()
        w = lw.exp()
        if o["sequence_level_ratios"]:
            w = (lw * mask).sum(1).exp().unsqueeze(1).expand_as(lw)
        lo = 0.0 if o["truncated_is_ratio_min"] is None else o["truncated_is_ratio_min"]
        if o["truncated_is"] == "tis":
            w = w.clamp(lo, o["truncated_is_ratio"])
        elif o["truncated_is"] == "icepop":
            w = w * ((w >= lo) & (w <= o["truncated_is_ratio"]))
        elif o["truncated_is"] == "seq-mask-tis":
            s = ((lw * mask).sum(1) / per_seq).exp()
            w = w * ((s >= lo) & (s <= o["truncated_is_ratio"])).unsqueeze(1)
        l = l * w
    loss = red(l)
    if o["kl_penalty"]:
        raw = ref - cur
        x = raw if o["kl_input_clamp"] is None else raw.clamp(-o["kl_input_clamp"], o["kl_input_clamp"])
        kl = {"k1": -x, "k2": 0.5 * x * x, "k3": x.exp() - 1 - x}[o["kl_estimator"]]
        if o["kl_score_function_gradient"]:
            w = (cur - (gen if o["on_policy_kl_approximation"] else cur.detach())).exp()
            if o["kl_input_clamp"] is not None:
                w = torch.where(raw.abs() > o["kl_input_clamp"], w.detach(), w)
            kl = kl * w
        elif o["on_policy_kl_approximation"]:
            kl = kl * (cur - gen).exp().detach()
        if o["kl_output_clamp"] is not None:
            kl = kl.clamp(-o["kl_output_clamp"], o["kl_output_clamp"])
        loss = loss + o["kl_penalty"] * red(kl)
    if o["positive_example_nll_weight"]:
        correct = mask * d["positive"]  # other micro-batches hold 2 tokens of correct answers
        loss = loss + o["positive_example_nll_weight"] * (-cur * correct).sum() / (correct.sum() + 2.0 + 1e-8)
    return loss


DEFAULT = dict(kl_penalty=0.1, kl_estimator="k3", kl_input_clamp=20.0, kl_output_clamp=10.0,
               kl_score_function_gradient=False, on_policy_kl_approximation=False, clip_min=0.2, clip_max=0.3,
               clip_c=None, importance_sampling_correction=False, truncated_is="", truncated_is_ratio=None,
               truncated_is_ratio_min=None, sequence_level_ratios=False,
               token_level_loss=True, force_on_policy_ratio=False, cispo=False, disable_ppo_ratio=False,
               positive_example_nll_weight=0.0)


def cases():
    one = lambda **k: dict(DEFAULT, **k)
    for token in (True, False):
        for k, score, approx in itertools.product(("k1", "k2", "k3"), (False, True), (False, True)):
            yield one(token_level_loss=token, kl_estimator=k, kl_score_function_gradient=score,
                      on_policy_kl_approximation=approx)
        yield one(token_level_loss=token, kl_input_clamp=0.2, kl_output_clamp=0.05)
        yield one(token_level_loss=token, kl_input_clamp=0.2, kl_score_function_gradient=True)
        yield one(token_level_loss=token, kl_input_clamp=None, kl_output_clamp=None)
        yield one(token_level_loss=token, kl_penalty=0.0)
        yield one(token_level_loss=token, clip_c=1.1)
        yield one(token_level_loss=token, clip_c=3.0, clip_min=0.05, clip_max=0.05)
        yield one(token_level_loss=token, force_on_policy_ratio=True)
        yield one(token_level_loss=token, disable_ppo_ratio=True)
        yield one(token_level_loss=token, positive_example_nll_weight=0.5)
        yield one(token_level_loss=token, importance_sampling_correction=True)
        for kind in ("tis", "icepop", "seq-mask-tis"):
            for low in (None, 0.9):
                yield one(token_level_loss=token, importance_sampling_correction=True, truncated_is=kind,
                          truncated_is_ratio=1.2, truncated_is_ratio_min=low)
    yield one(cispo=True)
    yield one(cispo=True, importance_sampling_correction=True)
    for corrected in (False, True):
        yield one(token_level_loss=False, sequence_level_ratios=True, importance_sampling_correction=corrected)
    yield one(token_level_loss=False, sequence_level_ratios=True, clip_c=1.5, importance_sampling_correction=True,
              truncated_is="tis", truncated_is_ratio=1.1)


def main():
    goldens = []
    for number, options in enumerate(cases()):
        d = inputs(100 + number)
        d["current"].requires_grad_(True)
        loss = loss_of(d, options)
        loss.backward()
        flat = lambda x: [float(x[i, t]) for i, n in enumerate(LENGTHS) for t in range(n)]
        goldens.append(dict(options=options, lengths=LENGTHS, sequence_mask=SEQUENCE_MASK,
                            global_valid_tokens=float(d["mask"].sum()) + 3.0,
                            global_valid_sequences=sum(SEQUENCE_MASK) + 1.0,
                            global_positive_tokens=float((d["mask"] * d["positive"]).sum()) + 2.0,
                            inputs={k: flat(v.detach()) for k, v in d.items()}, loss=float(loss),
                            gradient=flat(d["current"].grad)))
    path = pathlib.Path(__file__).resolve().parents[1] / "data" / "loss_goldens.json"
    path.write_text(json.dumps(goldens))
    print(len(goldens), "cases in", path)


main()
