"""A Llama with random weights, written by hand: config.json and model.safetensors, no tokenizer."""
import json

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16}


def tensors(hidden, ffn, layers, vocab, seed=1):
    rng = np.random.default_rng(seed)
    out = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        out.update({at + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"})
        out.update({at + "mlp.gate_proj.weight": (ffn, hidden), at + "mlp.up_proj.weight": (ffn, hidden), at + "mlp.down_proj.weight": (hidden, ffn)})
        out.update({at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)})
    return {name: np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[1]) for name, shape in out.items()}


def write(folder, hidden=128, ffn=64, layers=2, vocab=256, dtype="F32", heads=4, seed=1):
    """The names and parameter counts of all tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
         "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": {"F32": "float32", "F16": "float16"}[dtype]}))
    all_ = {k: v.astype(DTYPES[dtype]) for k, v in tensors(hidden, ffn, layers, vocab, seed).items()}
    header, at = {}, 0
    for name, t in all_.items():
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in all_.values():
            f.write(t.tobytes())
    return {name: t.size for name, t in all_.items()}


def rows(path, lengths, vocab=256, masked=0, seed=2):
    rng = np.random.default_rng(seed)
    with open(path, "w") as f:
        for n in lengths:
            ids = rng.integers(3, vocab, n).tolist()
            f.write(json.dumps({"input_ids": ids, "labels": [-100] * masked + ids[masked:]}) + "\n")
