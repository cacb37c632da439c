"""peer.py MODE…: tokens per second of transformers + peft + bitsandbytes on the first GPU, at the shapes of make_model and the settings of
tests/bench/h200.md: NF4 with double quantisation, LoRA r = 16 on the seven projections, dropout 0, SDPA, fused AdamW, random weights.

MODE: words joined by "-": bf16 or fp16; 8b or 1b; ckpt (gradient checkpointing) or keep (all activations); compile (each layer).
bitsandbytes, transformers and peft are taken from where Python finds them (PYTHONPATH). Prints Markdown rows."""
import statistics
import sys
import time

import torch
import bitsandbytes as bnb
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {"8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, tie_word_embeddings=False),
          "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True)}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM, STEPS = 3, 5


def quantise(model, dtype):
    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            four = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, compress_statistics=True,
                                     quant_type="nf4", device="meta")
            four.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4").to("cuda")
            setattr(module, name, four)
    torch.cuda.empty_cache()
    model.is_loaded_in_4bit = True


def build(words):
    dtype = torch.float16 if "fp16" in words else torch.bfloat16
    config = LlamaConfig(**SHAPES["1b" if "1b" in words else "8b"], num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                         max_position_embeddings=131072, rope_theta=500000.0, rms_norm_eps=1e-5, use_cache=False)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    quantise(model, dtype)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    if "ckpt" in words:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"))
    if "compile" in words:
        for layer in model.base_model.model.model.layers:
            layer.compile()
    return model.train(), dtype


def measure(mode, shapes=((4, 2048), (1, 2048), (1, 8192))):
    torch.manual_seed(0)
    model, dtype = build(mode.split("-"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
    for batch, length in shapes:
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(WARM + STEPS):
            ids = torch.randint(0, 128256, (batch, length), device="cuda")
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.autocast("cuda", dtype):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        s = statistics.median(seconds[WARM:])
        print(f"| {mode} {batch}×{length} | {batch * length / s:,.0f} | {1e3 * s:.1f} | {torch.cuda.max_memory_allocated() / 2**30:.1f} |", flush=True)


for m in sys.argv[1:]:
    try:
        measure(m)
    except Exception as e:  # a peer that does not run is told, and the others are measured
        print(f"| {m} | {type(e).__name__}: {str(e)[:200]} |||", flush=True)
    torch.cuda.empty_cache()
