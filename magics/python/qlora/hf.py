"""transformers', TRL's, PEFT's and bitsandbytes' own configuration objects, and a trainer that takes them.

    job = qlora.from_transformers(SFTConfig(...), LoraConfig(...), BitsAndBytesConfig(...))
    trainer = qlora.SFTTrainer("tiny", args=SFTConfig(...), train_dataset=ds, peft_config=LoraConfig(...))
    trainer.train(); trainer.save_model("my-adapter")

The engine trains; nothing of torch is used but the objects it is handed. What has no effect is listed, what cannot be done is an
error that names it."""
import dataclasses
import enum
import hashlib
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from . import Error, _clean, _core, _rows, _write_rows, run

# Set by transformers itself, or by this module in another way.
ELSEWHERE = {"formatting_func", "resume_from_checkpoint", "model_init_kwargs", "hub_token", "push_to_hub_token", "push_to_hub", "hub_model_id",
             "hub_private_repo", "do_train", "do_eval", "remove_unused_columns", "logging_dir"}
# Hints for speed: without them the same is learnt, so a notebook that gives them runs.
HINTS = {"group_by_length": "the order is the seed's alone; padding is not computed with here, so nothing is lost",
         "auto_find_batch_size": "what does not fit is refused before it runs, with settings that fit"}
# What TRL's trainer took itself before SFTConfig did; many notebooks still hand it over so.
FORMER = {"dataset_text_field", "max_seq_length", "packing", "eval_packing", "dataset_num_proc", "dataset_batch_size", "dataset_kwargs",
          "neftune_noise_alpha", "num_of_sequences", "chars_per_token"}
# Collators that pad and copy tokens to labels, which the engine does itself.
COLLATORS = {"DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorWithPadding", "DefaultDataCollator"}


class Job(dict):
    """Settings by their names here; .ignored says, one line each, what was asked for and has no effect."""

    def __init__(self):
        super().__init__()
        self.ignored = []

    def __repr__(self):
        lines = [f"{k}: {json.dumps(v)}" for k, v in self.items()] + [f"not honoured: {text}" for text in self.ignored]
        return "\n".join(lines)

    def apply(self):
        """Makes it the notebook's settings; model and data stay."""
        return run("config", body=json.dumps(dict(self)), reset=True)


def _value(v):
    """An argument as JSON has it: enums by value, torch's dtypes and paths by name, sets in order."""
    if isinstance(v, enum.Enum):
        return _value(v.value)
    if type(v).__name__ == "dtype" and type(v).__module__ == "torch":
        return str(v).rsplit(".", 1)[-1]
    if isinstance(v, (set, frozenset)):
        return sorted(_value(x) for x in v)
    if isinstance(v, (list, tuple)):
        return [_value(x) for x in v]
    if isinstance(v, dict):
        return {str(_value(k)): _value(x) for k, x in v.items()}
    return _clean(v)


def _fields(config):
    """(name, value, default) of every argument of a dataclass or of BitsAndBytesConfig."""
    if dataclasses.is_dataclass(config) and not hasattr(config, "quant_method"):
        # The class's defaults as an object of it has them; what decides how they are read is taken over.
        same = {k: getattr(config, k) for k in ("use_cpu", "fp16", "bf16") if hasattr(config, k)}
        plain = type(config)(**same)
        names = [f.name for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")]
        for name in names:
            yield name, _value(getattr(config, name, None)), _value(getattr(plain, name, None))
        return
    plain = type(config)().to_dict()
    for name, v in config.to_dict().items():
        if not name.startswith("_") and name != "quant_method":
            yield name, _value(v), _value(plain.get(name))


def _known():
    table = {}
    for s in json.loads(_core.settings()):
        for name in [s["name"], *(s["alias"] or "").split("|")]:
            table.setdefault(name, s)
    return table


def _fsdp(name, value):
    """transformers' fsdp as text, and only such keys of fsdp_config as are set."""
    if name == "fsdp":
        return " ".join(value) if isinstance(value, list) else value
    return {k: v for k, v in (value or {}).items() if v not in (None, False, 0, "", []) and not k.startswith("xla")}


def from_transformers(*configs):
    """TrainingArguments or SFTConfig, LoraConfig, BitsAndBytesConfig, in any order → a Job."""
    job, known, refused = Job(), _known(), []
    for config in configs:
        for name, value, default in _fields(config) if config is not None else ():
            _take(job, known.get(name), name, value, default, refused)
    _settle(job)
    if refused:
        raise Error("this engine cannot do: " + "; ".join(refused))
    return job


def _take(job, setting, name, value, default, refused):
    """One argument: into the job, its list of what has no effect, or the list of what cannot be done."""
    if name in ELSEWHERE:
        return
    if name in ("fsdp", "fsdp_config"):
        value, default = _fsdp(name, value), _fsdp(name, default)
        if not value:
            return  # nothing said: the planner chooses where the base rests
    if name == "train_sampling_strategy" and value == "group_by_length":
        job.ignored.append(f"{name}={value!r}: {HINTS[value]}")
    elif name == "dataset_kwargs":
        if value:
            job.ignored.append(f"{name}={value!r}: rows with input_ids are taken as they are, text as the tokenizer's own settings say")
    elif name == "max_length" and value is None and value != default:
        job.ignored.append("max_length=None: samples are cut at 1,024 tokens; say the length of the longest (memory is planned for it)")
    elif name in ("task_type", "peft_type"):
        if value not in (None, default, "CAUSAL_LM", "LORA") or name == "peft_type" and value not in (None, "LORA"):
            refused.append(f"{name}={value!r}: only {'CAUSAL_LM' if name == 'task_type' else 'LORA'} is trained")
    elif setting is None:
        if value != default:
            job.ignored.append(f"{name}={value!r}: unknown to this engine")
    elif name in HINTS:
        if value:
            job.ignored.append(f"{name}={value!r}: {HINTS[name]}")
    elif setting["refused"]:
        if value != default and value not in (None, False, {}, []):
            refused.append(f"{name}={value!r}: {setting['refused']}")
    elif setting["note"]:
        if value != default and ("always" not in setting["note"] or value is False):
            job.ignored.append(f"{name}={value!r}: {setting['note']}")
    elif value is not None:
        job[setting["name"]] = value


def _settle(job):
    """Where one thing has several names, or leaving it out means something else there."""
    if "r" in job:
        # PEFT's own choice for these families. An empty pattern is no pattern.
        job.setdefault("target_modules", ["q_proj", "v_proj"])
    if job.get("gradient_checkpointing") is False:
        del job["gradient_checkpointing"]  # left to the plan: the bits are the same, with fewer recomputed layers where memory allows
    half = next((d for d in ("fp16", "bf16") if job.get(d)), None)
    for name in ("fp16", "bf16"):
        if not job.get(name):
            job.pop(name, None)
    if half or job.get("bnb_4bit_compute_dtype") == "float32":
        compute, wanted = job.pop("bnb_4bit_compute_dtype", None), {"fp16": "float16", "bf16": "bfloat16"}.get(half)
        if compute not in (None, "float32", wanted):
            job.ignored.append(f"bnb_4bit_compute_dtype={compute!r}: {half} is set, and there is one compute dtype")
    for name in ("trainer_output", "tmp_trainer"):
        if job.get("output_dir") == name:
            del job["output_dir"]  # nobody's choice: runs/run-N
    if job.get("max_steps", -1) > 0:
        job.pop("num_train_epochs", None)
    if job.get("warmup_ratio") == 0:
        del job["warmup_ratio"]


class _Namespace:
    """transformers' TrainerState and TrainerControl where transformers is not installed."""

    def __init__(self, **values):
        self.__dict__.update(values)


class TrainOutput(tuple):
    """(global_step, training_loss, metrics), by name too."""
    __slots__ = ()
    global_step = property(lambda self: self[0])
    training_loss = property(lambda self: self[1])
    metrics = property(lambda self: self[2])


class SFTTrainer:
    """TRL's trainer, its work done by the engine. model: a name, a folder, or a loaded model (then its name is what counts, and
    the adapter that a PeftModel carries, fresh or from_pretrained, is what training starts from).

    Has train, evaluate, save_model, save_state, push_to_hub, add_callback, remove_callback, log_metrics, save_metrics, state, args and run
    (the engine's own record). Arguments that have no effect are warned about, and are in .job.ignored; what cannot be done is an error.
    Callbacks see steps, logs, evaluations and checkpoints after the engine has done them: control.should_training_stop ends the run after
    the step that is under way; should_save, should_evaluate and should_log cannot ask for more than args do, and are warned about."""

    def __init__(self, model, args=None, train_dataset=None, eval_dataset=None, peft_config=None, formatting_func=None, callbacks=None,
                 quantization_config=None, **others):
        self.args, self.run, self._best = args, None, None
        self._init = dict(getattr(args, "model_init_kwargs", None) or {})
        quantization_config = quantization_config or self._init.pop("quantization_config", None)
        self._peft = model if getattr(model, "peft_config", None) and peft_config is None else None
        loaded = ["model: only its name counts; the object stays as it is, and the memory it takes is not the engine's (del model)"]
        loaded *= self._peft is None and not isinstance(model, (str, Path))
        self.model_name, peft_config, quantization_config = _model(model, peft_config, quantization_config)
        if isinstance(quantization_config, dict):
            quantization_config = None  # of a file that is in 4 bits already: the engine reads it there
        former = {k: others.pop(k) for k in sorted(FORMER & set(others))}
        self._init.update(others.pop("model_init_kwargs", None) or {})
        self.job = from_transformers(args, peft_config, quantization_config)
        refused = []
        for name, value in former.items():
            if value is not None:
                _take(self.job, _known().get(name), name, _value(value), None, refused)
        if refused:
            raise Error("this engine cannot do: " + "; ".join(refused))
        for name in ("dtype", "torch_dtype", "revision"):
            if name in self._init:
                self.job["dtype" if "dtype" in name else name] = _value(self._init.pop(name))
        self.job.ignored += loaded + [f"model_init_kwargs {k}={v!r}: unknown to this engine" for k, v in self._init.items()]
        tokenizer = others.pop("processing_class", None) or others.pop("tokenizer", None)
        for name in ("chat_template", "eos_token"):
            if isinstance(getattr(tokenizer, name, None), str):
                self.job.setdefault(name, getattr(tokenizer, name))
        if tokenizer is not None and getattr(tokenizer, "name_or_path", "") not in ("", self.model_name):
            self.job.ignored.append(f"processing_class={tokenizer.name_or_path!r}: the tokenizer in the model's own folder is read, with this "
                                    "one's chat template and end of text")
        collator = others.get("data_collator")
        if type(collator).__name__ in COLLATORS and not getattr(collator, "mlm", False):
            del others["data_collator"]
            self.job.ignored.append(f"data_collator={type(collator).__name__}: the engine pads and makes labels itself: padding is never learnt, "
                                    "the end of a text always")
        for name, value in others.items():
            if value is not None and not (isinstance(value, tuple) and not any(value)):
                raise Error(f"SFTTrainer takes no {name}: the engine makes batches, optimizer and schedule from args")
        for text in self.job.ignored:
            warnings.warn("qlora: not honoured: " + text, stacklevel=2)
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, tokenizer
        self._format = formatting_func
        self._follow = _Follower(args, callbacks)
        self.state, self.control = self._follow.state, self._follow.control

    def _prepare(self, fresh=False):
        """Model, settings and data as the verbs take them. A fresh run never overwrites one: a cell that is run again trains beside it."""
        job = {"data": None, "eval_dataset": None, **self.job}  # a reset keeps the notebook's own data
        if fresh and job.get("output_dir") and _runs(job["output_dir"]):
            old, job["output_dir"] = job["output_dir"], _free(job["output_dir"])
            print(f"{old} holds a run already: this one is {job['output_dir']}")
        folder = Path(job.get("output_dir") or "runs").parent
        for name, rows in (("train", self.train_dataset), ("eval", self.eval_dataset)):
            if rows is not None:
                job["data" if name == "train" else "eval_dataset"] = self._path(name, rows, folder)
        if self._peft is not None and "adapter" not in job:
            job["adapter"] = _adapter(self._peft, folder)
        run("config", reset=True)  # what an earlier trainer set, its adapter before all, is not this one's
        run("load", self.model_name)
        return run("config", body=json.dumps(job), reset=True)

    def _path(self, name, rows, folder):
        if isinstance(rows, (str, Path)):
            return str(rows)
        if isinstance(rows, Iterable) and not hasattr(rows, "__len__"):
            raise Error(f"{name}_dataset has no length: the engine draws its own order and needs all rows (list(ds.take(n)) has one)")
        found = _rows(name + "_dataset", rows)
        if found is None and isinstance(rows, Iterable):
            found = iter(rows)
        if found is None:
            raise Error(f"{name}_dataset is a {type(rows).__name__}: a Dataset, a list of dicts, a DataFrame or a file's path is needed")
        if self._format is not None:
            field = self.job.get("dataset_text_field", "text")
            found = ({field: _text(self._format, row)} for row in found)
        return _write_rows(name, found, folder)["path"]

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        if trial is not None:
            raise Error("SFTTrainer.train takes no trial: a search over settings is a loop of trainers")
        resume = resume_from_checkpoint if resume_from_checkpoint is not None else getattr(self.args, "resume_from_checkpoint", None)
        if resume is True and "output_dir" in self.job:
            resume = (_runs(self.job["output_dir"]) or [self.job["output_dir"]])[-1]
        self._prepare(fresh=not resume)
        self._follow.begin()
        began = time.monotonic()
        _core.listen(self._follow.event)
        try:
            if resume:
                self.run = run("resume", *([] if resume is True else [resume]), **self._further(resume))
            else:
                self.run = run("train")
        except _core.Stopped:
            if not self._follow.stopping:
                raise
            self.run = last_run()
        finally:
            _core.listen(None)
        self._follow.end()
        self._best = self._best_of_a_stopped_run()
        self._hand_back()
        last = next((r for r in reversed(self.state.log_history) if "train_runtime" in r), None)
        if last is None:  # stopped: no last record is written
            last = {"train_runtime": round(time.monotonic() - began, 4), "epoch": self.state.epoch}
        metrics = {k: v for k, v in last.items() if k != "step"}
        loss = metrics.get("train_loss")
        if loss is None:
            losses = [x for x in self.run.loss if x is not None]
            loss = metrics["train_loss"] = sum(losses) / len(losses) if losses else None
        return TrainOutput((self.state.global_step, loss, metrics))

    def _further(self, resume):
        """How far a resumed run goes where args say another end than it was started with."""
        path = Path("." if resume is True else resume)
        path = path.parent if path.name.startswith("checkpoint-") else path
        try:
            was = json.loads((path / "job.json").read_text())
        except (OSError, ValueError):
            return {}
        return {k: self.job[k] for k in ("max_steps", "num_train_epochs") if k in self.job and self.job[k] != was.get(k, self.job[k])}

    def _best_of_a_stopped_run(self):
        """The checkpoint that load_best_model_at_end asks for where a callback ended the run, which the engine takes for a pause."""
        if not (self._follow.stopping and getattr(self.args, "load_best_model_at_end", False) and self.state.best_model_checkpoint):
            return None
        best = self.run.path / Path(self.state.best_model_checkpoint).name
        if not best.is_dir():
            return None
        print(f"load_best_model_at_end: {best} is what is saved and evaluated from here on")
        return best

    def _hand_back(self):
        """A PeftModel that was handed over gets what was trained: what is done with it next is done with that."""
        if self._peft is None or not self.state.global_step:
            return
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file
        with tempfile.TemporaryDirectory() as made:
            run("save", made, run=self._trained())
            set_peft_model_state_dict(self._peft, load_file(Path(made) / "adapter_model.safetensors"),
                                      adapter_name=getattr(self._peft, "active_adapter", "default"))

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        if self.run is None:
            self._prepare()
        other = {}
        if eval_dataset is not None:
            other["eval_dataset"] = self._path("eval", eval_dataset, Path(self.job.get("output_dir") or "runs").parent)
        found = run("eval", self._trained() if self.run is not None else "none", **other)
        metrics = {k.replace("eval", metric_key_prefix, 1): v for k, v in found.items() if k.startswith("eval_")}
        if self.state.epoch is not None:
            metrics["epoch"] = self.state.epoch
        self._follow._log(metrics)
        self._follow.call("on_evaluate", metrics=metrics)
        return metrics

    def _trained(self):
        if self.run is None:
            raise Error("nothing is trained yet: .train() first")
        return str(self._best or self.run.path)

    def _folder(self):
        folder = Path(getattr(self.args, "output_dir", None) or self._trained())
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def save_model(self, output_dir=None):
        run("save", *([str(output_dir)] if output_dir else []), run=self._trained())
        if getattr(self.args, "push_to_hub", False):
            self.push_to_hub()

    def push_to_hub(self):
        """Uploads the adapter to args.hub_model_id, else to the name of output_dir; gives its address. The token: HF_TOKEN."""
        path = self._trained()
        name = getattr(self.args, "hub_model_id", None) or Path(getattr(self.args, "output_dir", None) or path).name
        private = {"private": True} if getattr(self.args, "hub_private_repo", None) else {}
        return run("save", run=path, push_to_hub=name, **private)["hub"]["url"]

    def save_state(self):
        """trainer_state.json where transformers puts it; the run's folder has the engine's own."""
        path = self._folder() / "trainer_state.json"
        if hasattr(self.state, "save_to_json"):
            self.state.save_to_json(str(path))

    def log_metrics(self, split, metrics):
        print(f"***** {split} metrics *****")
        for key in sorted(metrics):
            print(f"  {key:26} = {metrics[key]}")

    def save_metrics(self, split, metrics, combined=True):
        for name in [split] + ["all"] * bool(combined):
            path = self._folder() / f"{name}_results.json"
            old = json.loads(path.read_text()) if name == "all" and path.exists() else {}
            path.write_text(json.dumps({**old, **_clean(metrics)}, indent=4, sort_keys=True))

    def add_callback(self, callback):
        self._follow.callbacks().add_callback(callback)

    def remove_callback(self, callback):
        self._follow.callbacks().remove_callback(callback)

    def __getattr__(self, name):
        raise AttributeError(f"qlora.SFTTrainer has no {name}: the engine trains, and no torch model or optimizer is in this process. "
                             "It has train, evaluate, save_model, save_state, push_to_hub, add_callback, state and run")

    @property
    def model(self):
        """The PeftModel that was handed over, else the model's name, which can save_pretrained what was trained."""
        if self._peft is not None:
            return self._peft
        name = _Name(self.model_name)
        name.trainer = self
        return name


class _Name(str):
    def save_pretrained(self, save_directory, **others):
        self.trainer.save_model(save_directory)

    def __getattr__(self, name):
        raise AttributeError(f"trainer.model is a name here and has no {name}: trainer.save_model('adapter'), then "
                             f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(self)!r}), 'adapter')")


def _runs(output_dir):
    """Runs that output_dir and its namesakes (out, out-2 …) hold, the newest last."""
    path = Path(output_dir)
    found = [p for p in [path, *path.parent.glob(path.name + "-*")]
             if (p == path or p.name[len(path.name) + 1:].isdigit()) and (p / "events.jsonl").exists()]
    return [str(p) for p in sorted(found, key=lambda p: (p / "events.jsonl").stat().st_mtime_ns)]


def _free(output_dir):
    n = 2
    while Path(f"{output_dir}-{n}").exists():
        n += 1
    return f"{output_dir}-{n}"


def last_run():
    from . import _result
    return _result(_core.last())


def _text(function, row):
    """A row's text by formatting_func, which takes a row and gives text, or takes a batch (columns as lists) and gives a list."""
    try:
        made = function(row)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        made = error
    if isinstance(made, str):
        return made
    try:
        batch = function({k: [v] for k, v in row.items()})
    except Exception:
        batch = None
    if isinstance(batch, (list, tuple)) and len(batch) == 1 and isinstance(batch[0], str):
        return batch[0]
    if isinstance(made, Exception):
        raise made
    raise Error(f"formatting_func must give a row's text; it gave a {type(made).__name__}")


def _model(model, peft_config, quantization_config):
    if isinstance(model, (str, Path)):
        return str(model), peft_config, quantization_config
    adapters = getattr(model, "peft_config", None)
    if adapters and peft_config is None:
        peft_config = next(iter(adapters.values()))
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(model, "name_or_path", None)
    if not name:
        raise Error("the model has no name: give SFTTrainer the folder or the name it was loaded from")
    return name, peft_config, quantization_config or getattr(config, "quantization_config", None)


def _adapter(model, folder):
    """The adapter as the PeftModel holds it, in a PEFT folder named by what is in it."""
    where = Path(folder) / ".data"
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as made:
        model.save_pretrained(made)
        name = getattr(model, "active_adapter", "default")
        made = Path(made) / name if (Path(made) / str(name)).is_dir() else Path(made)  # any but "default" has a folder of its own
        # PEFT sorts what it writes; of the patterns the first that matches holds.
        config, patterns = made / "adapter_config.json", {p: getattr(model.peft_config[name], p) for p in ("rank_pattern", "alpha_pattern")}
        config.write_text(json.dumps({**json.loads(config.read_text()), **patterns}, indent=2))
        digest = hashlib.sha256(b"".join((made / f).read_bytes() for f in ("adapter_config.json", "adapter_model.safetensors")))
        path = where / f"adapter-{digest.hexdigest()[:8]}"
        shutil.copytree(made, path, dirs_exist_ok=True)
    return str(path)


class _Follower:
    """The engine's events as transformers' callbacks see a training: same objects, same order."""

    def __init__(self, args, callbacks):
        try:
            from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
        except ImportError:
            if callbacks:
                raise Error("callbacks are transformers' own: pip install transformers")
            self.handler = None
            self.state = _Namespace(global_step=0, max_steps=0, epoch=0.0, log_history=[], best_metric=None)
            self.control = _Namespace(should_training_stop=False)
        else:
            self.plain = DefaultFlowCallback()
            made = [c() if isinstance(c, type) else c for c in callbacks or []]
            self.handler = CallbackHandler([DefaultFlowCallback(), *made], None, None, None, None) if args is not None else None
            if made and args is None:
                raise Error("callbacks need args: SFTConfig(...) or TrainingArguments(...)")
            self.state, self.control = TrainerState(), TrainerControl()
        self.args = args
        if self.handler:
            self.call("on_init_end")

    def callbacks(self):
        if self.handler is None:
            raise Error("callbacks are transformers' own, and need args: SFTConfig(...) or TrainingArguments(...)")
        return self.handler

    def call(self, name, **more):
        if self.handler is None:
            return
        function = getattr(self.handler, name)
        self.control = (function(self.args, self.state, self.control, *more.values()) if more else
                        function(self.args, self.state, self.control)) or self.control

    def begin(self):
        self.state.log_history, self.state.global_step = [], 0
        self.losses, self.began, self.stopping, self.path = [], False, False, None
        self.control.should_training_stop = False
        self.state.best_metric = self.state.best_model_checkpoint = None
        self.warned = set()

    def event(self, text):
        """True: a callback asked to stop."""
        ev = json.loads(text)
        on = getattr(self, "on_" + ev["ev"], None)
        if on:
            on(ev)
        if self.stopping or not (self.control.should_training_stop and ev["ev"] == "step"):
            return False
        if self.state.global_step >= self.state.max_steps:  # transformers' own callback asks so at the last step: its evaluation and checkpoint are due
            return False
        self.stopping = True
        return True

    def on_start(self, ev):
        self.path = ev.get("run")
        self.state.max_steps, self.state.global_step = ev.get("max_steps", 0), ev.get("resumed", 0)
        self.state.num_train_epochs = int(ev.get("epochs") or 0) + (float(ev.get("epochs") or 0) % 1 > 0)
        self.state.logging_steps = self.state.train_batch_size = None
        if self.args is not None:
            self.state.train_batch_size = getattr(self.args, "per_device_train_batch_size", None)
            self._every("logging_steps"), self._every("eval_steps"), self._every("save_steps")
        self.epoch = -1
        self.began = True
        self.call("on_train_begin")

    def _every(self, name):
        n = getattr(self.args, name, None)
        setattr(self.state, name, max(1, int(n * self.state.max_steps + 0.999999)) if n and n < 1 else int(n or 0) or self.state.max_steps + 1)

    def on_step(self, ev):
        if int(self.state.epoch or 0) != self.epoch:
            if self.epoch >= 0:
                self.call("on_epoch_end")
            self.epoch = int(self.state.epoch or 0)
            self.call("on_epoch_begin")
        self.call("on_step_begin")
        self.state.global_step, self.state.epoch = ev["step"], ev.get("epoch", 0.0)
        if ev.get("loss") is not None:
            self.losses.append(ev["loss"])
        self.call("on_step_end")
        self._more_than_asked()
        if self.handler is None or self.control.should_log:
            logs = {"loss": sum(self.losses) / len(self.losses) if self.losses else None}
            logs.update({k: ev.get(k) for k in ("grad_norm", "learning_rate", "epoch")})
            self.losses = []
            self._log(logs)

    def _more_than_asked(self):
        """What a callback asks for at a step where args do not: the engine is past it."""
        if self.handler is None:
            return
        plain = self.plain.on_step_end(self.args, self.state, type(self.control)())
        for flag, setting in (("should_save", "save_steps"), ("should_evaluate", "eval_steps"), ("should_log", "logging_steps")):
            if getattr(self.control, flag) and not getattr(plain, flag) and flag not in self.warned:
                self.warned.add(flag)
                warnings.warn(f"qlora: not honoured: a callback set control.{flag} at step {self.state.global_step}; {setting} says when", stacklevel=2)
            setattr(self.control, flag, getattr(plain, flag))

    def _log(self, logs):
        self.state.log_history.append(dict(logs, step=self.state.global_step))
        self.call("on_log", logs=logs)

    def on_eval(self, ev):
        metrics = {k: v for k, v in ev.items() if k.startswith("eval_")}
        self._log(dict(metrics, epoch=self.state.epoch))
        self.call("on_evaluate", metrics=metrics)
        self._best(metrics.get("eval_loss"))

    def _best(self, loss):
        """As Trainer keeps it, after the callbacks; EarlyStoppingCallback reads it at the next evaluation."""
        if loss is None or not getattr(self.args, "metric_for_best_model", None):
            return
        best = self.state.best_metric
        if best is None or (loss > best if getattr(self.args, "greater_is_better", None) else loss < best):
            self.state.best_metric, self.state.best_global_step = loss, self.state.global_step

    def on_checkpoint(self, ev):
        self.call("on_save")

    def end(self):
        """The engine's own records, the ones that its trainer_state.json holds, are the last word."""
        checkpoints = sorted(Path(self.path).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]), reverse=True) if self.path else []
        for folder in [Path(self.path), *checkpoints[:1]] if self.path else ():
            try:
                state = json.loads((folder / "trainer_state.json").read_text())
            except (OSError, ValueError):
                continue
            if state.get("global_step") == self.state.global_step:
                self.state.log_history = state["log_history"]
                for name in ("best_metric", "best_model_checkpoint", "best_global_step", "total_flos"):
                    setattr(self.state, name, state.get(name))
                break
        if self.began and self.epoch >= 0:
            self.call("on_epoch_end")
        self.call("on_train_end")
