#!/usr/bin/env python3
"""Makes tests/golden/generate.json: what transformers' generate says, all prompts of a run as one batch (padded on the left), to the
models of the other fixtures. Needs those, and the same libraries.

    python tests/golden/make_generate.py
"""
import json
import os
import sys
import tempfile

import peft
import torch
import transformers

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import make  # noqa: E402
import ref  # noqa: E402

LENGTHS = [1, 5, 7, 19, 64, 101]  # of the prompts: shorter and longer than Mistral's window of 7 and than a micro-batch
NEW = 40
RUNS = [{"repetition_penalty": 1.0}, {"repetition_penalty": 1.3}]


def generate(model, prompts, **how):
    """(answers without the token that ended them, the least lead of a chosen token over the runner-up)."""
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2,
                         output_scores=True, return_dict_in_generate=True, **how)
    answers, lead = [], float("inf")
    for i in range(len(prompts)):
        answer = []
        for step, token in enumerate(out.sequences[i, n:].tolist()):
            top = torch.topk(out.scores[step][i], 2).values
            lead = min(lead, (top[0] - top[1]).item())
            if token == 2:
                break
            answer.append(token)
        answers.append(answer)
    return answers, lead


def models(name, case):
    """The case's model as it is and from NF4, each with its adapter and without it."""
    folder = os.path.join(here, name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model"), dtype=torch.float32, attn_implementation="eager")
    stored = {n: p.detach().to(ref.DTYPES[case["dtype"]]) for n, p in plain.named_parameters()}
    with tempfile.TemporaryDirectory() as scratch:
        nf4 = ref.write_nf4(plain, stored, scratch, case["dtype"], case["double_quant"], case.get("keep", ()), case["old_spelling"])
    for variant, model in (("model", plain), ("model-nf4", nf4)):
        yield variant, False, model.eval()
        yield variant, True, peft.PeftModel.from_pretrained(model, os.path.join(folder, "adapter")).eval()


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cases = []
    for name, case in make.CASES.items():
        gen = torch.Generator().manual_seed(77)
        vocab = case["config"]().vocab_size
        for folder, adapter, model in models(name, case):
            for how in RUNS:
                lead = 0
                while lead < 2e-3:  # else the last bits of two programs decide
                    prompts = [torch.randint(3, vocab, (n,), generator=gen).tolist() for n in LENGTHS]
                    answers, lead = generate(model, prompts, **how)
                cases.append({"model": f"{name}/{folder}", "adapter": f"{name}/adapter" if adapter else None, **how,
                              "max_new_tokens": NEW, "prompts": prompts, "answers": answers, "smallest_lead": lead})
                print(cases[-1]["model"], adapter, how, [len(a) for a in answers], f"{lead:.4f}")
    with open(os.path.join(here, "generate.json"), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
