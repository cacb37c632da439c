"""qlora.from_transformers and qlora.SFTTrainer with the real TrainingArguments, SFTConfig, LoraConfig, BitsAndBytesConfig and datasets."""
import dataclasses
import os
import pathlib
import sys

import peft
import pytest
import safetensors.torch
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig, TrainerCallback, TrainingArguments
from trl import SFTConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build")
TINY = str(ROOT / "notebooks" / "tiny")
sys.path.insert(0, str(BUILD / "python"))
import qlora  # noqa: E402


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sft(**more):
    return SFTConfig(**{**dict(output_dir="out", use_cpu=True, bf16=False, max_steps=6, learning_rate=1e-3, max_length=128, seed=7,
                               per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=2, report_to="none"), **more})


def rows():
    return Dataset.from_list([{"text": f"Once upon a time there were {i} cats. They sat on {i} mats."} for i in range(64)])


def test_names_and_values():
    job = qlora.from_transformers(
        TrainingArguments(output_dir="x", use_cpu=True, learning_rate=3e-4, lr_scheduler_type="cosine", warmup_steps=3, optim="adamw_8bit",
                          per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True, seed=3407,
                          dataloader_num_workers=4, torch_compile=False, ddp_find_unused_parameters=False),
        LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "k_proj"], use_rslora=True, lora_dropout=0.05),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
    wanted = {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3, "optim": "adamw_8bit", "seed": 3407, "r": 64,
              "gradient_accumulation_steps": 4, "lora_alpha": 128, "target_modules": ["k_proj", "q_proj"], "use_rslora": True,
              "lora_dropout": 0.05, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "gradient_checkpointing": True, "output_dir": "x"}
    assert {k: job.get(k) for k in wanted} == wanted
    text = "\n".join(job.ignored)
    assert "dataloader_num_workers=4" in text and "ddp_find_unused_parameters=False" in text, text
    assert "learning_rate" not in text and len(job.ignored) == 2, text


def test_their_defaults_not_ours():
    job = qlora.from_transformers(TrainingArguments(use_cpu=True), LoraConfig())
    assert job["learning_rate"] == 5e-5 and job["per_device_train_batch_size"] == 8 and job["r"] == 8 and job["logging_steps"] == 500
    assert job["target_modules"] == ["q_proj", "v_proj"] and job["num_train_epochs"] == 3 and "output_dir" not in job
    assert job.ignored == []
    job.apply()  # every value is one that the engine takes


def test_what_older_transformers_set_themselves():
    """Before 5, logging_dir was made from output_dir: nobody asked for it."""
    @dataclasses.dataclass
    class Older(TrainingArguments):
        logging_dir: str = None

        def __post_init__(self):
            super().__post_init__()
            self.logging_dir = self.output_dir + "/runs/today"

    assert qlora.from_transformers(Older(output_dir="x", use_cpu=True)).ignored == []


def test_refused_by_name():
    with pytest.raises(qlora.Error, match="use_dora.*DoRA is not supported"):
        qlora.from_transformers(LoraConfig(use_dora=True))
    with pytest.raises(qlora.Error, match="load_in_8bit"):
        qlora.from_transformers(BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(qlora.Error, match="neftune"):
        qlora.from_transformers(sft(neftune_noise_alpha=5))


class Watch(TrainerCallback):
    def __init__(self, stop_at=None):
        self.seen, self.logs, self.stop_at = [], [], stop_at

    def __getattribute__(self, name):
        if name in ("on_train_begin", "on_step_begin", "on_save", "on_evaluate", "on_train_end", "on_epoch_begin"):
            return lambda args, state, control, **k: self.seen.append(name) or control
        return object.__getattribute__(self, name)

    def on_step_end(self, args, state, control, **k):
        assert isinstance(state, transformers.TrainerState) and isinstance(control, transformers.TrainerControl)
        assert isinstance(args, TrainingArguments) and state.max_steps == args.max_steps
        self.seen.append(("step", state.global_step))
        control.should_training_stop = state.global_step == self.stop_at

    def on_log(self, args, state, control, logs=None, **k):
        self.logs.append((state.global_step, logs))


def trainer(**more):
    return qlora.SFTTrainer(TINY, **{**dict(args=sft(), train_dataset=rows(), peft_config=LoraConfig(r=8, target_modules="all-linear")), **more})


def test_train_evaluate_save(folder):
    watch = Watch()
    t = trainer(args=sft(eval_strategy="steps", eval_steps=3, save_steps=3), eval_dataset=rows().select(range(8)), callbacks=[watch])
    out = t.train()
    assert out.global_step == 6 and t.state.global_step == 6 and 0 < out.training_loss < 20
    assert [s for n, s in [x for x in watch.seen if isinstance(x, tuple)]] == [1, 2, 3, 4, 5, 6]
    assert watch.seen[0] == "on_train_begin" and watch.seen[-1] == "on_train_end"
    assert watch.seen.count("on_evaluate") == 2 and watch.seen.count("on_save") >= 2
    logged = [(step, logs["loss"]) for step, logs in watch.logs if "loss" in logs]
    assert [s for s, _ in logged] == [2, 4, 6]
    # trainer_state.json's own records are the means that the callbacks saw.
    records = [(r["step"], r["loss"]) for r in t.state.log_history if "loss" in r]
    assert [s for s, _ in records] == [2, 4, 6]
    assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(logged, records))
    metrics = t.evaluate()
    last = [r["eval_loss"] for r in t.state.log_history if "eval_loss" in r][-1]
    assert abs(metrics["eval_loss"] - last) < 1e-6
    # transformers logs this evaluation, too: the records have it, callbacks are told in its order.
    assert t.state.log_history[-1] == dict(metrics, step=6) and metrics["epoch"] == t.state.epoch
    assert watch.logs[-1] == (6, metrics) and watch.seen[-1] == "on_evaluate"
    t.save_model("adapter")
    model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(TINY), "adapter")
    assert model.peft_config["default"].r == 8


def test_a_callback_stops_and_it_is_resumed():
    steps = dict(max_steps=60, logging_steps=10)
    whole = trainer(args=sft(**steps))
    whole.train()
    t = trainer(args=sft(output_dir="stopped", **steps), callbacks=[Watch(stop_at=3)])
    out = t.train()
    assert 3 <= out.global_step < 60, "stopped by the callback"
    again = trainer(args=sft(output_dir="stopped", **steps))
    again.train(resume_from_checkpoint=str(t.run.path))
    assert again.run.loss[-1] == whole.run.loss[-1], "the same bits as without the stop"
    assert again.state.global_step == 60


def test_the_last_evaluation_is_not_stopped():
    """transformers' own callback sets should_training_stop at the last step; what is due there is done all the same."""
    long = Dataset.from_list([{"text": f"{i} cats sat on {i} mats and " * 12} for i in range(96)])
    watch = Watch(stop_at=4)  # a person's own may, too
    t = trainer(args=sft(max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True),
                eval_dataset=long, callbacks=[watch])
    out = t.train()
    assert [r["step"] for r in t.state.log_history if "eval_loss" in r] == [2, 4] and watch.seen.count("on_evaluate") == 2
    assert "train_loss" in out.metrics and t.state.best_global_step == 4 and t.state.best_model_checkpoint.endswith("checkpoint-4")


def test_the_best_model_of_a_run_that_a_callback_ended(folder):
    """What EarlyStoppingCallback is for: the saved adapter is the best evaluation's, not the last step's."""
    t = trainer(args=sft(max_steps=20, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
                         greater_is_better=True), eval_dataset=rows().select(range(8)), callbacks=[transformers.EarlyStoppingCallback(1)])
    out = t.train()
    assert out.global_step < 20 and out.metrics["train_loss"] == out.training_loss and t.state.best_model_checkpoint.endswith("checkpoint-2")  # the loss falls, so the first is the greatest
    t.save_model("saved")
    saved, best, last = ((folder / f / "adapter_model.safetensors").read_bytes() for f in
                         ("saved", "out/checkpoint-2", f"out/checkpoint-{out.global_step}"))
    assert saved == best != last
    assert abs(t.evaluate()["eval_loss"] - t.state.best_metric) < 1e-6


def test_total_flos(folder):
    """The sum over a run is TRL's own: padding counted, the embedding left out, the adapter not."""
    import trl
    data = Dataset.from_list([{"text": "cats and mats " * (1 + i % 7)} for i in range(24)])
    lora = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    args = dict(max_steps=5, per_device_train_batch_size=3, save_strategy="no", gradient_checkpointing=False)
    theirs = trl.SFTTrainer(transformers.AutoModelForCausalLM.from_pretrained(TINY), args=sft(output_dir="theirs", **args), train_dataset=data,
                            peft_config=lora, processing_class=transformers.AutoTokenizer.from_pretrained(TINY))
    theirs.train()
    ours = trainer(args=sft(**args), train_dataset=data, peft_config=lora)
    ours.train()
    assert ours.state.total_flos == ours.state.log_history[-1]["total_flos"] == theirs.state.total_flos == theirs.state.log_history[-1]["total_flos"]


def test_the_adapter_of_a_peft_model(folder):
    """PeftModel.from_pretrained(…, is_trainable=True): training starts from its weights, with its settings."""
    trainer(args=sft(max_steps=3)).train()
    qlora.run("save", "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
    t = qlora.SFTTrainer(model, args=sft(output_dir="on", learning_rate=0.0), train_dataset=rows())
    t.train()
    t.save_model("same")
    assert (folder / "same" / "adapter_model.safetensors").read_bytes() == (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    named = trainer(args=sft(output_dir="named"))
    named.job["adapter"] = "adapter"
    with pytest.raises(qlora.Error, match="lora_alpha|target_modules|r is"):
        named.job["r"] = 3
        named.train()


def test_the_patterns_of_a_peft_model(folder):
    """The first that matches holds, as in the model; PEFT writes them in the alphabet's order."""
    config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], rank_pattern={"self_attn.q_proj": 4, "q_proj": 2},
                        alpha_pattern={"self_attn.q_proj": 64, "q_proj": 1}, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(TINY), config)
    t = qlora.SFTTrainer(model, args=sft(max_steps=2), train_dataset=rows())
    t.train()
    t.save_model("adapter")
    again = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(TINY), "adapter")
    scales = [{n: m.scaling["default"] for n, m in x.named_modules() if hasattr(m, "lora_A")} for x in (model, again)]
    assert scales[0] == scales[1] and 16 in scales[0].values()


def test_formatting_func_and_lists():
    data = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(32)]
    a = trainer(train_dataset=data, formatting_func=lambda r: f"{r['q']}\n{r['a']}")
    b = trainer(args=sft(output_dir="out-b"), train_dataset=[{"text": f"{r['q']}\n{r['a']}"} for r in data])
    a.train(), b.train()
    assert a.run.loss == b.run.loss


def test_eval_datasets_and_formatting_func():
    """formatting_func makes both sets' texts; evaluate takes another set, and another prefix."""
    data = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(32)]
    func = {"formatting_func": lambda r: f"{r['q']}\n{r['a']}"}
    t = trainer(args=sft(eval_strategy="steps", eval_steps=3), train_dataset=data, eval_dataset=data[:8], **func)
    out = t.train()
    plain = trainer(args=sft(output_dir="out-b", eval_strategy="steps", eval_steps=3), eval_dataset=[{"text": f"{r['q']}\n{r['a']}"} for r in data[:8]],
                    train_dataset=[{"text": f"{r['q']}\n{r['a']}"} for r in data])
    plain.train()
    losses = [[r["eval_loss"] for r in x.state.log_history if "eval_loss" in r] for x in (t, plain)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert out.metrics["train_runtime"] > 0 and out.metrics["train_loss"] == out.training_loss and "train_samples_per_second" in out.metrics
    own = t.evaluate()["eval_loss"]
    other = t.evaluate(data[8:24], metric_key_prefix="test")
    assert set(other) >= {"test_loss", "test_runtime"} and other["test_loss"] != own
    assert t.evaluate()["eval_loss"] == own, "another set was for one call"
    with pytest.raises(qlora.Error, match="one a name of its own"):
        trainer(eval_dataset={"a": rows(), "b": rows()}).train()


def test_early_stopping(folder):
    """transformers' own callback, which reads state.best_metric: no evaluation is better by 10."""
    t = trainer(args=sft(max_steps=200, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True, logging_steps=1,
                         metric_for_best_model="eval_loss", save_total_limit=2), eval_dataset=rows().select(range(4)),
                callbacks=[transformers.EarlyStoppingCallback(3, 10.0)])
    out = t.train()
    assert 8 <= out.global_step < 200
    losses = [r["eval_loss"] for r in t.state.log_history if "eval_loss" in r]
    assert t.state.best_metric == min(losses)
    assert out.metrics["train_runtime"] > 0


def test_what_has_no_effect_is_said(folder):
    class Greedy(TrainerCallback):
        def on_step_end(self, args, state, control, **k):
            control.should_save = control.should_evaluate = True

    with pytest.warns(UserWarning, match="not honoured: dataloader_num_workers=2"):
        t = trainer(args=sft(dataloader_num_workers=2, save_strategy="no"))
    t.add_callback(Greedy())
    with pytest.warns(UserWarning, match="control.should_save at step 1; save_steps says when"):
        t.train()
    t.remove_callback(Greedy)
    t.save_state()
    t.save_metrics("train", {"train_loss": 1.5})
    assert (folder / "out" / "trainer_state.json").exists() and '"train_loss": 1.5' in (folder / "out" / "all_results.json").read_text()
    for name in ("predict", "create_optimizer", "accelerator"):
        assert not hasattr(t, name)
    with pytest.raises(AttributeError, match="no torch model or optimizer"):
        t.predict([])


def test_the_tokenizer_that_is_given():
    """Its chat template and end of text are used; that it lies elsewhere is said."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    chats = [{"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}."}]} for i in range(16)]
    a = trainer(train_dataset=chats)
    b = trainer(args=sft(output_dir="b"), train_dataset=chats, processing_class=tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    c = trainer(args=sft(output_dir="c"), train_dataset=chats, processing_class=tokenizer)
    for t in (a, b, c):
        t.train()
    assert a.run.loss == b.run.loss and a.run.loss != c.run.loss
    tokenizer.name_or_path = "someone/else"
    with pytest.warns(UserWarning, match="someone/else.*in the model's own folder is read"):
        trainer(processing_class=tokenizer)


def test_what_cannot_be():
    with pytest.raises(qlora.Error, match="takes no compute_metrics"):
        trainer(compute_metrics=lambda p: {})
    with pytest.raises(qlora.Error, match="has no length"):
        trainer(train_dataset=rows().to_iterable_dataset()).train()
    with pytest.raises(qlora.Error, match="nothing is trained yet"):
        trainer().save_model("x")


def test_what_trl_took_itself_before():
    """The notebooks of many: a TrainingArguments, the rest beside it; a collator that only pads."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    args = dict(use_cpu=True, max_steps=2, learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no")
    data = [{"body": f"{i} cats sat on {i} mats and " * 9} for i in range(16)]
    a = trainer(args=TrainingArguments("a", **args), train_dataset=data, dataset_text_field="body", max_seq_length=32, packing=False, dataset_num_proc=2,
                tokenizer=tokenizer, data_collator=transformers.DataCollatorForSeq2Seq(tokenizer))
    assert a.job["max_length"] == 32 and a.job["dataset_text_field"] == "body" and a.job["packing"] is False
    assert [x.partition("=")[0] for x in a.job.ignored] == ["dataset_num_proc", "data_collator"]
    b = trainer(args=SFTConfig("b", bf16=False, dataset_text_field="body", max_length=32, **{**args, "gradient_checkpointing": False, "per_device_train_batch_size": 8}),
                train_dataset=data)
    a.train(), b.train()
    assert a.run.loss == b.run.loss
    with pytest.raises(qlora.Error, match="NEFTune"):
        trainer(neftune_noise_alpha=5)
    with pytest.raises(qlora.Error, match="takes no data_collator"):
        trainer(data_collator=lambda rows: rows)


def test_hints_and_what_would_be_silent():
    job = qlora.from_transformers(sft(max_length=None, average_tokens_across_devices=False, train_sampling_strategy="group_by_length",
                                      auto_find_batch_size=True, remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True}))
    assert sorted(x.partition("=")[0] for x in job.ignored) == ["auto_find_batch_size", "average_tokens_across_devices", "dataset_kwargs", "max_length",
                                                                "train_sampling_strategy"]
    job.apply()
    with pytest.raises(qlora.Error, match="task_type='SEQ_CLS': only CAUSAL_LM is trained"):
        qlora.from_transformers(LoraConfig(task_type="SEQ_CLS"))
    with pytest.raises(qlora.Error, match="peft_type='IA3': only LORA is trained"):
        qlora.from_transformers(peft.IA3Config())


def test_the_column_that_is_named_is_what_is_trained():
    """A text made from instruction and output stands beside them; so does one beside role/content conversations. As in TRL."""
    texts = [f"### {i} cats\n### {i} mats" for i in range(16)]
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 16
    runs = [trainer(args=sft(output_dir=f"out-{name}"), train_dataset=Dataset.from_dict({"text": texts, **more}))
            for name, more in (("a", {}), ("b", {"instruction": ["x"] * 16, "output": ["y"] * 16}), ("c", {"conversations": chats}))]
    for t in runs:
        t.train()
    assert runs[0].run.loss == runs[1].run.loss == runs[2].run.loss


def test_formatting_func_of_a_batch():
    """TRL's older examples loop over the columns' lists; on a row alone such a function loops over letters."""
    def batch(rows):
        return [f"{rows['q'][i]}\n{rows['a'][i]}" for i in range(len(rows["q"]))]

    data = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(32)]
    data[3]["a"] = "short"
    a = trainer(train_dataset=data, formatting_func=batch)
    b = trainer(args=sft(output_dir="out-b"), train_dataset=data, formatting_func=lambda r: f"{r['q']}\n{r['a']}")
    a.train(), b.train()
    assert a.run.loss == b.run.loss
    with pytest.raises(qlora.Error, match="must give a row's text; it gave a int"):
        trainer(args=sft(output_dir="c"), train_dataset=data, formatting_func=lambda r: 1).train()
    with pytest.raises(KeyError, match="nowhere"):
        trainer(args=sft(output_dir="c"), train_dataset=data, formatting_func=lambda r: r["nowhere"]).train()


def test_the_model_afterwards(folder):
    """model.save_pretrained and model.generate are what notebooks do next: a PeftModel has the trained weights, a name can be saved."""
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(TINY), lora)
    t = qlora.SFTTrainer(model, args=sft(), train_dataset=rows())
    t.train()
    assert t.model is model
    model.save_pretrained("handed")
    t.save_model("saved")
    mine, theirs = (safetensors.torch.load_file(folder / f / "adapter_model.safetensors") for f in ("saved", "handed"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert any(v.abs().sum() > 0 for k, v in theirs.items() if "lora_B" in k)
    named = trainer(args=sft(output_dir="named"))
    named.train()
    named.model.save_pretrained("from-name")
    assert (folder / "from-name" / "adapter_model.safetensors").exists() and named.model == TINY
    with pytest.raises(AttributeError, match="name here and has no generate"):
        named.model.generate()
    with pytest.warns(UserWarning, match="only its name counts"):
        qlora.SFTTrainer(transformers.AutoModelForCausalLM.from_pretrained(TINY), args=sft(), train_dataset=rows(), peft_config=lora)


def test_a_cell_that_is_run_again(capsys):
    """A second run stands beside the first; resume_from_checkpoint=True goes on with the newest of this output_dir, to where args say."""
    for _ in range(2):
        t = trainer()
        t.train()
    assert t.run.path.name == "out-2" and "out holds a run already: this one is out-2" in capsys.readouterr().out
    trainer(args=sft(output_dir="other")).train()
    on = trainer(args=sft(max_steps=8, lr_scheduler_type="constant"))
    out = on.train(resume_from_checkpoint=True)
    assert on.run.path.name == "out-2" and out.global_step == 8
    with pytest.raises(qlora.Error):
        trainer(args=sft(output_dir="none")).train(resume_from_checkpoint=True)
