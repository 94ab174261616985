#!/usr/bin/env python3
"""The model against Hugging Face transformers in float32: logits, log-probs, parameter gradients, greedy generation,
which experts the rows of a sequence choose, and the exported folder read back by transformers.

    cmake --build build/cpu --target model_dump
    python3 tests/parity/model_parity.py [--driver build/cpu/tests/parity/model_dump] [--rounds 3]

Makes its own Python environment (torch 2.11.0, transformers 5.23.0; about 5 GB) in build/parity-venv on the first run.
Random small configurations of every family: sizes, heads, biases, tied or untied heads, rope scalings, and config.json
in the spelling of transformers 4 as well as 5.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "parity-venv"
PACKAGES = ["torch==2.11.0", "transformers==5.23.0", "numpy"]
LOGITS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def enter_environment():
    """Runs this script again in its environment, which is made if it is not there."""
    if pathlib.Path(sys.prefix).resolve() == VENV.resolve():
        return
    done = VENV / "complete"
    if not done.exists():
        print(f"making {VENV}", flush=True)
        venv.create(VENV, with_pip=True, clear=True)
        subprocess.run([VENV / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        done.touch()
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])


def random_config(family, rng):
    kv_heads = rng.choice([1, 2, 3])
    group = rng.choice([1, 2, 4])
    head_dim = rng.choice([8, 10, 16, 24])
    heads = kv_heads * group
    # transformers wants a multiple
    hidden = heads * head_dim if rng.random() < 0.5 else heads * rng.choice([6, 11, 20])
    values = dict(vocab_size=rng.choice([61, 97, 260]), hidden_size=hidden, intermediate_size=rng.choice([36, 80, 128]),
                  num_hidden_layers=rng.choice([1, 2, 3]), num_attention_heads=heads, num_key_value_heads=kv_heads,
                  head_dim=head_dim, max_position_embeddings=256, rms_norm_eps=rng.choice([1e-5, 1e-6]),
                  initializer_range=0.15, tie_word_embeddings=rng.random() < 0.5, bos_token_id=1,
                  eos_token_id=rng.choice([2, [2, 3]]))
    theta = rng.choice([10000.0, 500000.0])
    rope = {"rope_theta": theta, "rope_type": "default"}
    if family == "llama" and rng.random() < 0.3:
        rope = {"rope_theta": theta, "rope_type": "linear", "factor": 2.0}
    if family == "llama3":
        rope = {"rope_theta": theta, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": rng.choice([16, 64])}
    if family.startswith("qwen"):
        rope |= rng.choice([{}, {"rope_type": "dynamic", "factor": 4.0},
                            {"rope_type": "yarn", "factor": 4.0,
                             "original_max_position_embeddings": rng.choice([16, 64])},
                            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                             "truncate": False, "beta_fast": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}])
    values["rope_parameters"] = rope
    if family.startswith("llama"):
        values["attention_bias"] = rng.random() < 0.3
        values["mlp_bias"] = rng.random() < 0.3
    experts = rng.choice([4, 6, 8])
    if family == "qwen3_moe":
        values |= dict(num_experts=experts, num_experts_per_tok=rng.choice([1, 2, 4]),
                       moe_intermediate_size=rng.choice([12, 40]), norm_topk_prob=rng.random() < 0.7,
                       decoder_sparse_step=rng.choice([1, 1, 2]), mlp_only_layers=rng.choice([[], [], [0]]))
    if family == "mixtral":
        values |= dict(num_local_experts=experts, num_experts_per_tok=rng.choice([1, 2, 3]), sliding_window=None)
    return values


def make_model(family, rng, seed, dir):
    import torch
    import transformers as tf
    tf.logging.disable_progress_bar()
    kinds = {"llama": (tf.LlamaConfig, tf.LlamaForCausalLM), "llama3": (tf.LlamaConfig, tf.LlamaForCausalLM),
             "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM), "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
             "qwen3_moe": (tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM),
             "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM)}
    config_type, model_type = kinds[family]
    torch.manual_seed(seed)
    model = model_type(config_type(**random_config(family, rng)))
    with torch.no_grad():  # norms and biases too must matter
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(dir)
    return model


def spell_like_transformers_4(dir):
    path = dir / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def with_experts_together(gradients):
    """Gradients by the Hub's names -> by those that transformers 5 gives what it holds of all experts in one tensor."""
    import re
    import torch
    experts, others = {}, {}
    for name, value in gradients.items():
        found = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found:
            layer, index, matrix = found[1], int(found[2]), {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
            experts.setdefault(layer, {})[index, matrix.get(found[3], found[3])] = value
        else:
            others[name.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = value
    for layer, of in experts.items():
        count = 1 + max(index for index, _ in of)
        others[layer + ".mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([of[i, "gate_proj"], of[i, "up_proj"]]) for i in range(count)])
        others[layer + ".mlp.experts.down_proj"] = torch.stack([of[i, "down_proj"] for i in range(count)])
    return others


def same_choices(choices, model, sequences):
    """Whether every layer with experts was asked for each of them as often, by each sequence by itself."""
    import torch
    chosen = model.config.num_experts_per_tok
    for own, ids in zip(choices, sequences):
        with torch.no_grad():
            logits = model(ids.unsqueeze(0), output_router_logits=True).router_logits or ()
        wanted = [torch.bincount(of_layer.reshape(-1, own.shape[1]).topk(chosen, -1).indices.flatten(),
                                 minlength=own.shape[1]).double() for of_layer in logits if of_layer is not None]
        own = [of_layer for of_layer in own if of_layer.sum() > 0]
        if len(own) != len(wanted) or not all(torch.equal(a, b) for a, b in zip(own, wanted)):
            return False
    return True


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def check_family(family, seed, driver, dir):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    rng = random.Random(f"{family}-{seed}")
    model_dir, exported = dir / "model", dir / "exported"
    model = make_model(family, rng, seed, model_dir).eval()
    old_spelling = seed % 2 == 1
    if old_spelling:
        spell_like_transformers_4(model_dir)
    lengths = [rng.randint(2, 60) for _ in range(3)]
    sequences = [torch.randint(0, model.config.vocab_size, (n,)) for n in lengths]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    save_file({"ids": torch.cat(sequences), "starts": starts}, dir / "input.safetensors")
    run = subprocess.run([driver, model_dir, dir / "input.safetensors", dir / "output.safetensors", exported],
                         capture_output=True, text=True, timeout=600)
    if run.returncode != 0:
        raise SystemExit(f"{family} seed {seed}: {run.stderr}")
    ours = load_file(dir / "output.safetensors")

    logits = [model(ids.unsqueeze(0)).logits[0] for ids in sequences]
    logprobs = torch.cat([torch.log_softmax(row[:-1], -1).gather(1, ids[1:, None])[:, 0]
                          for row, ids in zip(logits, sequences)])
    logprobs.mean().backward()
    errors = {"logits": relative_error(ours["logits"], torch.cat(logits).detach()),
              "logprobs": relative_error(ours["logprobs"], logprobs.detach())}
    own = with_experts_together({name[5:]: value for name, value in ours.items() if name.startswith("grad.")})
    names = {name for name, _ in model.named_parameters()}
    if names != own.keys():
        raise SystemExit(f"{family} seed {seed}: other parameters than transformers has: {sorted(names ^ own.keys())}")
    # What gets no gradient (a router of one choice that is all of the weight) has zeros in both, but for rounding.
    largest = max(p.grad.abs().max() for p in model.parameters())
    gradients = {name: relative_error(own[name], p.grad) for name, p in model.named_parameters()
                 if max(p.grad.abs().max(), own[name].abs().max()) > 1e-6 * largest}
    worst = max(gradients, key=gradients.get)

    ids = sequences[0].unsqueeze(0)
    with torch.no_grad():
        for _ in range(12):  # not generate(): it stops at the end token
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    greedy = ids[0, lengths[0]:].tolist()

    if "choices" in ours and not same_choices(ours["choices"], model, sequences):
        raise SystemExit(f"{family} seed {seed}: other experts are chosen than in transformers")

    reloaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        again = torch.cat([reloaded(ids.unsqueeze(0)).logits[0] for ids in sequences])
    if not torch.equal(again, torch.cat(logits).detach()):
        raise SystemExit(f"{family} seed {seed}: the exported folder gives other logits in transformers")
    print(f"{family:9} seed {seed} ({'v4' if old_spelling else 'v5'} config): logits {errors['logits']:.1e}, "
          f"log-probs {errors['logprobs']:.1e}, gradients {gradients[worst]:.1e} ({worst}), "
          f"greedy equal {greedy == ours['greedy'].tolist()}, export reloads equal")
    if (max(errors.values()) > LOGITS_TOLERANCE or gradients[worst] > GRADIENT_TOLERANCE
            or greedy != ours["greedy"].tolist()):
        raise SystemExit(f"{family} seed {seed}: beyond the tolerance")


def check_values(family, seed, driver, dir):
    """A ...ForSequenceClassification folder of transformers scores its sequences' last tokens as it does there."""
    import torch
    import transformers as tf
    from safetensors.torch import load_file, save_file
    kinds = {"llama": (tf.LlamaConfig, tf.LlamaForSequenceClassification),
             "qwen2": (tf.Qwen2Config, tf.Qwen2ForSequenceClassification),
             "qwen3": (tf.Qwen3Config, tf.Qwen3ForSequenceClassification),
             "qwen3_moe": (tf.Qwen3MoeConfig, tf.Qwen3MoeForSequenceClassification),
             "mixtral": (tf.MixtralConfig, tf.MixtralForSequenceClassification)}
    config_type, model_type = kinds[family]
    rng = random.Random(f"values-{family}-{seed}")
    torch.manual_seed(seed)
    model = model_type(config_type(**random_config(family, rng), num_labels=1)).eval()
    model.save_pretrained(dir / "model")
    lengths = [rng.randint(1, 50) for _ in range(3)]
    sequences = [torch.randint(0, model.config.vocab_size, (n,)) for n in lengths]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    save_file({"ids": torch.cat(sequences), "starts": starts}, dir / "input.safetensors")
    run = subprocess.run([driver, "--values", dir / "model", dir / "input.safetensors", dir / "output.safetensors",
                          dir / "exported"], capture_output=True, text=True, timeout=600)
    if run.returncode != 0:
        raise SystemExit(f"{family} values, seed {seed}: {run.stderr}")
    ours = load_file(dir / "output.safetensors")["values"][starts[1:] - 1]
    scores = lambda of: torch.cat([of(ids.unsqueeze(0)).logits[0] for ids in sequences])
    with torch.no_grad():
        expected = scores(model)
        again = scores(model_type.from_pretrained(dir / "exported", dtype=torch.float32).eval())
    error = relative_error(ours, expected)
    print(f"{family:9} seed {seed}: values {error:.1e}, export reloads equal {torch.equal(again, expected)}")
    if error > LOGITS_TOLERANCE or not torch.equal(again, expected):
        raise SystemExit(f"{family} values, seed {seed}: beyond the tolerance")


def check_own_export(driver, dir):
    """A folder without a source config.json (init-model's) loads in transformers with the config it stands for."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    save_file({"ids": torch.arange(9), "starts": torch.tensor([0, 9])}, dir / "input.safetensors")
    for name in sorted(p.name for p in (dir / "own").iterdir()):
        subprocess.run([driver, dir / "own" / name, dir / "input.safetensors", dir / "output.safetensors",
                        dir / "copy" / name], check=True)
        model = AutoModelForCausalLM.from_pretrained(dir / "own" / name, dtype=torch.float32).eval()
        with torch.no_grad():
            error = relative_error(load_file(dir / "output.safetensors")["logits"],
                                   model(torch.arange(9)[None]).logits[0])
        print(f"init-model {name}: logits {error:.1e}")
        if error > LOGITS_TOLERANCE:
            raise SystemExit(f"init-model {name}: beyond the tolerance")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default=str(ROOT / "build/cpu/tests/parity/model_dump"))
    parser.add_argument("--rounds", type=int, default=4, help="random configurations per family")
    args = parser.parse_args()
    enter_environment()
    for seed in range(args.rounds):
        for family in ("llama", "llama3", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
            with tempfile.TemporaryDirectory() as dir:
                check_family(family, seed, args.driver, pathlib.Path(dir))
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
            with tempfile.TemporaryDirectory() as dir:
                check_values(family, seed, args.driver, pathlib.Path(dir))
    with tempfile.TemporaryDirectory() as dir:
        subprocess.run([args.driver, "--init", pathlib.Path(dir) / "own"], check=True)
        check_own_export(args.driver, pathlib.Path(dir))
    print("all within tolerance")


if __name__ == "__main__":
    main()
