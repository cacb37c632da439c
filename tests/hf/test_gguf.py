"""llama.cpp's own converter on merged models: LLAMA_CPP=/path/to/llama.cpp (its source; PyPI's llama-cpp-python carries it too) make test-hf.

Every tensor must be mapped and written, with the values of the merged file. One thing is not the converter's own here: it knows a BPE
tokenizer by a hash of what it makes of a test text, which no tokenizer of a test can have, so the answer for Llama 3 is put in."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open

import models
import transformers
from engine import Engine
from test_merge import TINY

LLAMA_CPP = os.environ.get("LLAMA_CPP")
RUN = """
import runpy, sys
sys.path[:0] = [{llama!r} + "/gguf-py", {llama!r}]
import conversion
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv = ["convert_hf_to_gguf.py", {folder!r}, "--outfile", {out!r}, "--outtype", "f32"]
runpy.run_path({llama!r} + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def write_tokenizer(folder):
    """Llama 3's pattern over bare bytes: the rows are ids already, but the converter wants a vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    (pattern,) = [p["pattern"]["Regex"] for p in json.load(open(os.path.join(TINY, "tokenizer.json")))["pre_tokenizer"]["pretokenizers"] if "pattern" in p]
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.save(os.path.join(folder, "tokenizer.json"))


@pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP names no llama.cpp")
@pytest.mark.parametrize("load_in_4bit", [False, True])
@pytest.mark.parametrize("family", ["tiny", *models.FAMILIES])
def test_converted(tmp_path, family, load_in_4bit, seed):
    sys.path[:0] = [os.path.join(LLAMA_CPP, "gguf-py")]
    import gguf
    model = TINY
    if family != "tiny":
        model = str(tmp_path / "model")
        config = models.random_config(family, np.random.default_rng(seed))
        options = {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")} if load_in_4bit else {}
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
        if load_in_4bit:
            transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options).save_pretrained(model)
        write_tokenizer(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [(7 * i + k) % 100 + 3 for k in range(24)]}) + "\n" for i in range(8)))
    run, merged, out = str(tmp_path / "run"), str(tmp_path / "merged"), str(tmp_path / "out.gguf")
    job = {"model": model, "data": str(rows), "devices": "cpu:1", "max_steps": 3, "max_length": 64, "learning_rate": 1e-2, "seed": 3, "load_in_4bit": load_in_4bit}
    with Engine() as e:
        e.run("train", job=job, run=run)
        e.run("merge", model=model, adapter=run, out=merged)
    done = subprocess.run([sys.executable, "-c", RUN.format(llama=LLAMA_CPP, folder=merged, out=out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    config = json.load(open(os.path.join(merged, "config.json")))
    arch = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config["model_type"]]
    reader = gguf.GGUFReader(out)
    assert str(reader.fields["general.architecture"].contents()) == arch
    assert reader.fields[arch + ".block_count"].contents() == config["num_hidden_layers"]
    written = {t.name: t.data for t in reader.tensors}
    names = gguf.get_tensor_name_map({"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch],
                                     config["num_hidden_layers"])
    seen = set()
    with safe_open(os.path.join(merged, "model.safetensors"), "pt") as f:
        for name in f.keys():
            to = names.get_name(name, try_suffixes=(".weight", ".bias"))
            seen.add(to)
            mine, theirs = f.get_tensor(name).float().numpy(), np.asarray(written[to])
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):  # rows in the other order of rotary halves
                mine, theirs = np.sort(mine, axis=0), np.sort(theirs, axis=0)
            assert np.array_equal(mine.reshape(-1), theirs.reshape(-1)), name
    assert set(written) - {"rope_freqs.weight"} == seen  # what llama3 scaling makes of the config
