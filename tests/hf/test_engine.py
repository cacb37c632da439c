"""The engine against transformers, peft and torch on fresh random models: training from the same adapter, and adapters of
either side read by the other. All in fp32 on the CPU."""
import copy
import json
import os
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import models
import ref
from engine import Engine, loss_of

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "notebooks", "tiny")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kaggle"))

STEPS, BATCH, ACCUMULATION, RATE, WARMUP = 10, 2, 2, 5e-3, 1


def base_job(folder, **more):
    return {"model": str(folder), "dtype": "float32", "devices": "cpu:1", **more}


def train_job(case, folder, seed, **more):
    return base_job(folder, data=os.path.join(case.path, "rows.jsonl"), max_steps=STEPS, max_length=64, seed=seed,
                    per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, learning_rate=RATE,
                    warmup_steps=WARMUP, weight_decay=0.01, save_strategy="no", **case.lora, **more)


def eval_job(case, folder, data, **more):
    return base_job(folder, eval_dataset=str(data), max_length=64, per_device_eval_batch_size=4, **more)


def initial_adapter(engine, job, path):
    """The adapter that a run with this seed starts from: one step at learning rate 0 leaves it as it was."""
    out = engine.run("train", job={**job, "learning_rate": 0.0, "max_steps": 1, "weight_decay": 0.0}, run=str(path))
    return out["adapter"]


BASES = {  # name: (folder, torch twin, settings)
    "plain": lambda c: (c.folder, c.model, {"load_in_4bit": False}),
    "nf4 file": lambda c: (c.folder_nf4, c.model_nf4, {}),
    "nf4 on load": lambda c: (c.folder, c.model_nf4, {"load_in_4bit": True,
                                                      "bnb_4bit_use_double_quant": c.double_quant}),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_training(tmp_path, family, base, seed):
    """Ten steps from one adapter: losses, gradient norms, the adapter at the end, eval_loss of it on both sides.

    What is quantised on load has 16-bit values, whose codes are bitsandbytes' own. An fp32 value within 2 ulp of a threshold may get
    the neighbouring code, and one code is more than 1e-5 of a loss."""
    case = models.Case(tmp_path, family, seed, sixteen=base == "nf4 on load")
    folder, twin, settings = BASES[base](case)
    job = train_job(case, folder, 7, **settings)
    with Engine() as engine:
        start = initial_adapter(engine, job, tmp_path / "start")
        out = engine.run("train", job=job, run=str(tmp_path / "run"))
        score = engine.run("eval", job=eval_job(case, folder, tmp_path / "eval.jsonl", **settings),
                           adapter=out["adapter"])
    steps = [e for e in out["events"] if e["ev"] == "step"]
    wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(twin), start, is_trainable=True)
    losses, norms = models.train(wrapped, case.rows, 7, STEPS, BATCH, ACCUMULATION, RATE, WARMUP, 1.0, 0.01)
    assert models.relative([loss_of(e) for e in steps], losses) < 1e-5
    assert models.relative([e["grad_norm"] for e in steps], norms) < 1e-4
    ours = load_file(os.path.join(out["adapter"], "adapter_model.safetensors"))
    theirs = ref.adapter_tensors(wrapped)
    assert sorted(ours) == sorted(theirs)
    # Against how far training moved it. Where a gradient is little more than rounding Adam still takes whole steps, so
    # single elements may part ways; the losses above say that none that matter do.
    began = load_file(os.path.join(start, "adapter_model.safetensors"))
    off, way = (torch.cat([(a[k] - b[k]).flatten() for k in ours]).norm() for a, b in ((ours, theirs), (theirs, began)))
    assert off < 1e-2 * way
    again = peft.PeftModel.from_pretrained(copy.deepcopy(twin), out["adapter"])
    assert score["eval_loss"] == pytest.approx(models.eval_loss(again, case.eval_rows, 4), rel=1e-6)


def test_skip_modules(tmp_path, seed):
    """llm_int8_skip_modules: what transformers keeps in 16 bits keeps its values here."""
    from transformers.quantizers.quantizers_utils import should_convert_module
    case = models.Case(tmp_path, "llama", seed, sixteen=True)  # as in test_training
    skip = ["model.layers.0.self_attn", "down_proj"]
    twin = copy.deepcopy(case.model_nf4)
    kept = 0
    with torch.no_grad():
        for name, module in case.model.named_modules():
            if isinstance(module, torch.nn.Linear) and not should_convert_module(name, skip):
                twin.get_submodule(name).weight.copy_(module.weight)
                kept += 1
    assert kept == 4 + case.config.num_hidden_layers
    settings = {"load_in_4bit": True, "bnb_4bit_use_double_quant": case.double_quant, "llm_int8_skip_modules": skip}
    with Engine() as engine:
        score = engine.run("eval", job=eval_job(case, case.folder, tmp_path / "eval.jsonl", **settings), adapter=None)
    assert score["eval_loss"] == pytest.approx(models.eval_loss(twin, case.eval_rows, 4), rel=1e-6)
    assert score["eval_loss"] != pytest.approx(models.eval_loss(case.model_nf4, case.eval_rows, 4), rel=1e-6)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_peft_adapter(tmp_path, family, seed):
    """An adapter that PEFT saved, ranks and alphas by pattern: token by token the engine gives PEFT's probabilities."""
    case = models.Case(tmp_path, family, seed)
    wrapped = ref.attach(case.model_nf4, case.gen, **{**case.lora, "rank_pattern": {
        f"layers.0.*.{case.lora['target_modules'][0]}": 3}, "alpha_pattern": {case.lora["target_modules"][-1]: 5}})
    ref.save_adapter(wrapped, str(tmp_path / "adapter"))
    row, mine, theirs = case.eval_rows[0], [], []
    wrapped.eval()
    logits = wrapped(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0].detach()
    with Engine() as engine:
        for at in range(1, min(8, len(row["input_ids"]))):
            labels = [-100] * len(row["input_ids"])
            labels[at] = row["input_ids"][at]
            with open(tmp_path / "one.jsonl", "w") as f:
                f.write(json.dumps({"input_ids": row["input_ids"], "labels": labels}) + "\n")
            mine.append(engine.run("eval", job=eval_job(case, case.folder_nf4, tmp_path / "one.jsonl"),
                                   adapter=str(tmp_path / "adapter"))["eval_loss"])
            theirs.append(-torch.log_softmax(logits[at - 1], 0)[labels[at]].item())
    assert models.relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("family", models.FAMILIES[:2])
def test_training_from_a_peft_adapter(tmp_path, family, seed):
    """`adapter`: an adapter that PEFT saved, B not zero, ranks and alphas by pattern; five steps as PEFT's, from_pretrained as trainable."""
    case = models.Case(tmp_path, family, seed)
    wrapped = ref.attach(copy.deepcopy(case.model_nf4), case.gen, **{**case.lora, "rank_pattern": {
        f"layers.0.*.{case.lora['target_modules'][0]}": 3}, "alpha_pattern": {case.lora["target_modules"][-1]: 5}})
    ref.save_adapter(wrapped, str(tmp_path / "adapter"))
    # Slowly: where a gradient is little more than rounding Adam takes whole steps, and B is large from the start here.
    job = {**train_job(case, case.folder_nf4, 7, adapter=str(tmp_path / "adapter")), "max_steps": 5, "learning_rate": RATE / 5}
    job = {k: v for k, v in job.items() if k not in case.lora}
    with Engine() as engine:
        out = engine.run("train", job=job, run=str(tmp_path / "run"))
    steps = [e for e in out["events"] if e["ev"] == "step"]
    trained = peft.PeftModel.from_pretrained(copy.deepcopy(case.model_nf4), str(tmp_path / "adapter"), is_trainable=True)
    losses, norms = models.train(trained, case.rows, 7, 5, BATCH, ACCUMULATION, RATE / 5, WARMUP, 1.0, 0.01)
    assert models.relative([loss_of(e) for e in steps], losses) < 1e-5
    assert models.relative([e["grad_norm"] for e in steps], norms) < 1e-4
    again = peft.PeftConfig.from_pretrained(out["adapter"])
    assert again.rank_pattern == trained.peft_config["default"].rank_pattern and again.r == case.lora["r"]


def test_text(tmp_path):
    """From text to losses: the engine's tokens, order and steps are those of kaggle/reference.py."""
    import reference
    common = dict(learning_rate=5e-3, warmup_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                  seed=3407, max_steps=6, r=8, lora_alpha=16)
    job = base_job(TINY, data=os.path.join(TINY, "train.jsonl"), load_in_4bit=False, save_strategy="no",
                   max_length=512, **common)
    with Engine() as engine:
        start = initial_adapter(engine, job, tmp_path / "start")
        out = engine.run("train", job=job, run=str(tmp_path / "run"))
    args = [x for k, v in common.items() if k not in ("r", "lora_alpha") for x in (f"--{k}", str(v))]
    reference.main(["--model", TINY, "--data", os.path.join(TINY, "train.jsonl"), "--adapter", start, "--output_dir",
                    str(tmp_path / "theirs"), "--steps", "6", "--dtype", "float32", "--load_in_4bit", "0", *args])
    with open(tmp_path / "theirs" / "trainer_state.json") as f:
        theirs = [r for r in json.load(f)["log_history"] if "loss" in r]
    mine = [r for r in out["log_history"] if "loss" in r]
    assert [r["step"] for r in mine] == [r["step"] for r in theirs]
    assert models.relative([r["loss"] for r in mine], [r["loss"] for r in theirs]) < 1e-5
    assert [r["learning_rate"] for r in mine] == pytest.approx([r["learning_rate"] for r in theirs], rel=1e-6)
    assert [r["epoch"] for r in mine] == pytest.approx([r["epoch"] for r in theirs], rel=1e-6)


def test_generate(tmp_path, seed):
    """Greedy tokens with a PEFT adapter over the bundled model."""
    tok = transformers.AutoTokenizer.from_pretrained(TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    wrapped = ref.attach(model, torch.Generator().manual_seed(seed), r=4, lora_alpha=4, target_modules=ref.ALL_LINEAR)
    ref.save_adapter(wrapped, str(tmp_path / "adapter"))
    prompts = ["Mira was a", "Recipe: apples pie", "Weather for Sunday."]
    with Engine() as engine:
        out = engine.run("generate", job=base_job(TINY, load_in_4bit=False), adapter=str(tmp_path / "adapter"),
                         prompts=prompts, max_new_tokens=40, temperature=0)
    wrapped.eval()
    for prompt, text in zip(prompts, out["texts"]):
        ids = tok(prompt, return_tensors="pt").input_ids
        want = wrapped.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40,
                                do_sample=False, pad_token_id=tok.pad_token_id)[0, ids.shape[1]:]
        assert text == tok.decode(want, skip_special_tokens=True)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_generate_together(tmp_path, family, seed):
    """Several prompts as one batch, greedy, with a repetition penalty: the tokens of transformers' generate, from NF4 and an adapter."""
    import make_generate
    case = models.Case(tmp_path, family, seed)
    wrapped = ref.attach(case.model_nf4, case.gen, **case.lora)
    ref.save_adapter(wrapped, str(tmp_path / "adapter"))
    wrapped.eval()
    for penalty in (1.0, 1.2):
        lead = 0
        while lead < 1e-3:  # else the last bits decide
            prompts = [case.rng.integers(3, case.config.vocab_size, n).tolist() for n in (3, 40, 11, 1)]
            want, lead = make_generate.generate(wrapped, prompts, repetition_penalty=penalty)
        with Engine() as engine:
            out = engine.run("generate", job=base_job(case.folder_nf4, load_in_4bit=False), adapter=str(tmp_path / "adapter"), prompts=prompts,
                             max_new_tokens=make_generate.NEW, repetition_penalty=penalty)
        assert out["tokens"] == want
