#!/usr/bin/env python3
"""Grows the bundled tiny model: corpus → tokenizer.json → a Llama of about a million weights, trained here → bf16 files
and the fine-tuning sets. Needs torch, transformers and tokenizers (tests/hf/requirements.txt); about ten minutes on
one core. Everything comes from one seed.

    python notebooks/tiny/make.py [--data-only]
"""
import json
import os
import random
import sys
import time

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import corpus  # noqa: E402

SEED, VOCAB, STEPS, ROWS, LENGTH, RATE = 11, 1024, 1800, 16, 160, 3e-3
# The pattern of Llama 3's tokenizer.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
BOS, EOS, PAD, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eot_id|>"
SPECIAL = [BOS, EOS, "<|reserved_special_token_0|>", PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", EOT]
TEMPLATE = ("{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + "
            "'<|eot_id|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")


def chat(pairs):
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}" + EOT
    return BOS + "".join(head.format("user", q) + head.format("assistant", x) for q, x in pairs)


def document(r):
    """One document of the base corpus as the text of its tokens, special ones included."""
    kind = r.random()
    if kind < 0.3:
        return chat([corpus.question(r)[:2] for _ in range(r.randint(1, 4))])
    grow = (corpus.story if kind < 0.6 else corpus.recipe if kind < 0.77 else corpus.weather if kind < 0.93 else
            corpus.sailor)
    return BOS + grow(r) + EOS


def write_json(name, value):
    with open(os.path.join(here, name), "w") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def write_rows(name, rows):
    with open(os.path.join(here, name), "w") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_data():
    """Rows of the training and the eval set are all different."""
    r = random.Random(SEED + 1)
    tales = list(dict.fromkeys(corpus.pirate(r) for _ in range(900)))
    write_rows("train.jsonl", [{"text": t} for t in tales[:600]])
    write_rows("eval.jsonl", [{"text": t} for t in tales[600:664]])
    asked, rows = set(), []
    while len(rows) < 464:
        q, _, x = corpus.question(r)
        if q + x not in asked:
            asked.add(q + x)
            rows.append({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": x}]})
    write_rows("train_chat.jsonl", rows[:400])
    write_rows("eval_chat.jsonl", rows[400:])


def make_tokenizer():
    r = random.Random(SEED + 2)
    makers = [corpus.story, corpus.recipe, corpus.weather, corpus.pirate, lambda q: "\n".join(corpus.question(q))]
    tok = Tokenizer(models.BPE(ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator((makers[i % 5](r) for i in range(5000)), trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1",
                                      special_tokens=[(BOS, tok.token_to_id(BOS))])])
    tok.save(os.path.join(here, "tokenizer.json"))
    write_json("tokenizer_config.json", {
        "add_prefix_space": False, "bos_token": BOS, "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
        "eos_token": EOS, "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 1024,
        "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"})
    return tok


def stream(tok, r):
    """Endless rows of LENGTH ids: documents one after the other."""
    buffer = []
    while True:
        while len(buffer) < LENGTH:
            buffer += tok.encode(document(r), add_special_tokens=False).ids
        yield buffer[:LENGTH]
        buffer = buffer[LENGTH:]


def make_model(tok):
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=tok.token_to_id(BOS), eos_token_id=tok.token_to_id(EOS), pad_token_id=tok.token_to_id(PAD),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = LlamaForCausalLM(config).float().train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optim = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                              lr=RATE, betas=(0.9, 0.98))
    rows = stream(tok, random.Random(SEED + 3))
    began, mean = time.time(), 0.0
    for step in range(STEPS):
        scale = min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 1.4 * (1 - step / STEPS)))
        for group in optim.param_groups:
            group["lr"] = RATE * scale
        ids = torch.tensor([next(rows) for _ in range(ROWS)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {mean:.3f} {time.time() - began:.0f} s", flush=True)
    save_file({n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()},
              os.path.join(here, "model.safetensors"), {"format": "pt"})
    write_json("config.json", {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id, "eos_token_id": [config.eos_token_id, tok.token_to_id(EOT)], "head_dim": 32,
        "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 384,
        "max_position_embeddings": 1024, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": config.pad_token_id, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": VOCAB})
    write_json("generation_config.json", {
        "bos_token_id": config.bos_token_id, "eos_token_id": [config.eos_token_id, tok.token_to_id(EOT)],
        "pad_token_id": config.pad_token_id})


def main():
    torch.set_num_threads(1)
    make_data()
    tok = make_tokenizer()
    if "--data-only" not in sys.argv[1:]:
        make_model(tok)


if __name__ == "__main__":
    main()
