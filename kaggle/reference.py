#!/usr/bin/env python3
"""The same training job on ONE GPU with transformers, peft and bitsandbytes, for laying its curve over the engine's.

    python kaggle/reference.py --model unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit --data train.jsonl \\
        --adapter runs/run-1/initial --output_dir reference

Settings carry their TrainingArguments and LoraConfig names; the defaults are the notebook's reference run. The order of the
rows is the Trainer's own (the engine draws the same). Start both sides from one adapter (--adapter): random numbers
of two libraries are not the same. --steps stops early; the learning rate still runs to --max_steps. Writes
OUTPUT_DIR/trainer_state.json (log_history: loss, grad_norm, learning_rate per step) and OUTPUT_DIR/reference.json (seconds,
tokens, peak memory). Runs on the CPU too where there is no GPU, with --dtype float32.
"""
import argparse
import json
import os
import sys
import time


def arguments(argv):
    p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    p.add_argument("--model", required=True, help="folder or hub name, 16-bit or already in 4 bits")
    p.add_argument("--data", required=True, help="JSONL rows: text | messages | prompt + completion | input_ids")
    p.add_argument("--output_dir", default="reference")
    p.add_argument("--adapter", help="PEFT folder to start from; without it PEFT's own random start")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--max_steps", type=int, default=60)
    p.add_argument("--max_rows", type=int, default=0, help="use only the first rows of the file")
    p.add_argument("--r", type=int, default=64)
    p.add_argument("--lora_alpha", type=int, default=128)
    p.add_argument("--target_modules", default="all-linear", help="all-linear, or names with commas")
    p.add_argument("--use_rslora", action="store_true")
    p.add_argument("--learning_rate", type=float, default=2e-4)
    p.add_argument("--lr_scheduler_type", default="linear")
    p.add_argument("--warmup_steps", type=int, default=1)
    p.add_argument("--weight_decay", type=float, default=0.0)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--optim", default="adamw_torch")
    p.add_argument("--per_device_train_batch_size", type=int, default=2)
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    p.add_argument("--max_length", type=int, default=2048)
    p.add_argument("--seed", type=int, default=3407)
    p.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    p.add_argument("--load_in_4bit", type=int, default=1, help="0 leaves a 16-bit base as it is")
    p.add_argument("--bnb_4bit_use_double_quant", type=int, default=1)
    p.add_argument("--gradient_checkpointing", type=int, default=1)
    return p.parse_args(argv)


def prequantised(model):
    from transformers import AutoConfig
    return getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None


def load_model(args, torch):
    import peft
    import transformers
    dtype = getattr(torch, args.dtype)
    major = int(transformers.__version__.split(".")[0])
    options = {"dtype" if major >= 5 else "torch_dtype": dtype}
    if torch.cuda.is_available():
        options["device_map"] = {"": 0}
    if args.load_in_4bit and not prequantised(args.model):
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=bool(args.bnb_4bit_use_double_quant))
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
    for p in model.parameters():
        p.requires_grad = False
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if args.adapter:
        return peft.PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
    targets = args.target_modules if args.target_modules == "all-linear" else args.target_modules.split(",")
    torch.manual_seed(args.seed)
    return peft.get_peft_model(model, peft.LoraConfig(
        task_type="CAUSAL_LM", r=args.r, lora_alpha=args.lora_alpha, lora_dropout=0.0, target_modules=targets,
        use_rslora=args.use_rslora))


def read_rows(args):
    """Token ids and labels a row: text ends with eos; a prompt is not trained; the start of a long row is kept."""
    tok = None

    def tokenizer():
        nonlocal tok
        if tok is None:
            from transformers import AutoTokenizer
            tok = AutoTokenizer.from_pretrained(args.model)
        return tok

    def with_eos(text):
        eos = tokenizer().eos_token or ""
        return text if not eos or text.endswith(eos) else text + eos

    rows = []
    with open(args.data, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if "input_ids" in row:
                ids = list(row["input_ids"])
                labels = list(row.get("labels", ids))
            elif "messages" in row:
                text = tokenizer().apply_chat_template(row["messages"], tokenize=False)
                ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
                labels = list(ids)
            elif "prompt" in row:
                ids = tokenizer()(with_eos(row["prompt"] + row["completion"]))["input_ids"]
                head = len(tokenizer()(row["prompt"])["input_ids"])
                labels = [-100] * head + ids[head:]
            elif "text" in row:
                ids = tokenizer()(with_eos(row["text"]))["input_ids"]
                labels = list(ids)
            else:
                sys.exit(f"{args.data}:{number}: no text, messages, prompt or input_ids, but {', '.join(row)}")
            ids, labels = ids[:args.max_length], labels[:args.max_length]
            if any(x != -100 for x in labels[1:]):
                rows.append({"input_ids": ids, "labels": labels})
            if args.max_rows and len(rows) == args.max_rows:
                break
    if not rows:
        sys.exit(f"{args.data}: no row with anything to train on")
    pad = 0
    if tok is not None:
        pad = tok.pad_token_id if tok.pad_token_id is not None else tok.eos_token_id
    return rows, pad


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the Trainer would spread over two GPUs by DataParallel
    import torch
    import transformers

    def collate(batch):
        n = max(len(b["input_ids"]) for b in batch)

        def rows(key, fill):
            return torch.tensor([b[key] + [fill] * (n - len(b[key])) for b in batch])
        return {"input_ids": rows("input_ids", pad), "labels": rows("labels", -100),
                "attention_mask": torch.tensor([[1] * len(b["input_ids"]) + [0] * (n - len(b["input_ids"]))
                                                for b in batch])}

    class Watch(transformers.TrainerCallback):
        """Stops after --steps; times every step."""
        ends = []

        def on_step_end(self, targs, state, control, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.time())
            control.should_training_stop |= state.global_step >= args.steps
            return control

    rows, pad = read_rows(args)
    model = load_model(args, torch)
    model.print_trainable_parameters()
    gpu = torch.cuda.is_available()
    settings = transformers.TrainingArguments(
        output_dir=args.output_dir, max_steps=args.max_steps, learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup_steps, weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm, optim=args.optim, seed=args.seed, data_seed=args.seed,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, logging_steps=1, logging_nan_inf_filter=False,
        fp16=args.dtype == "float16" and gpu, bf16=args.dtype == "bfloat16", save_strategy="no", report_to="none",
        remove_unused_columns=False, use_cpu=not gpu,
        gradient_checkpointing=bool(args.gradient_checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False} if args.gradient_checkpointing else None)
    watch = Watch()
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, data_collator=collate,
                                   callbacks=[watch])
    began = time.time()
    trainer.train()
    trainer.state.save_to_json(os.path.join(args.output_dir, "trainer_state.json"))
    model.save_pretrained(os.path.join(args.output_dir, "adapter"))
    step_seconds = [b - a for a, b in zip([began] + watch.ends, watch.ends)]
    with open(os.path.join(args.output_dir, "reference.json"), "w") as f:
        json.dump({"settings": vars(args), "step_seconds": step_seconds, "rows": len(rows),
                   "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
                   "device": torch.cuda.get_device_name() if gpu else "cpu",
                   "versions": {m: sys.modules[m].__version__ for m in ("torch", "transformers", "peft", "bitsandbytes")
                                if m in sys.modules}}, f, indent=2)
        f.write("\n")
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']}: loss {record['loss']:.6f} grad_norm {record['grad_norm']:.5f} "
                  f"lr {record['learning_rate']:.3e}")


if __name__ == "__main__":
    main()
