"""The meaning of lines and bodies: which option goes where, and what is said when it is none."""
import json
import resource
import signal
import subprocess

import pytest
from front_end import BUILD, environment, shell


def error(line, tmp_path):
    r = shell(line + "\n", tmp_path)
    assert r.returncode == 1, r.stdout
    return r.stderr.strip().removeprefix("qlora: ")


@pytest.mark.parametrize("line,part", [
    ("trian", "unknown verb 'trian': did you mean 'train'?"),
    ("xyzzy", "%qlora help lists them all"),
    ("load", "load needs MODEL; usage: %qlora load MODEL"),
    ("load a b", "'b' is one word too many"),
    ("config --lora_rnak 4", "did you mean 'lora_rank'?"),
    ("plan --cpu_offload true", "plan has no option --cpu_offload: it is a key of fsdp_config: {\"cpu_offload\": …}"),
    ("config --cpu_off_load true", "config has no option --cpu_off_load: %qlora help config"),
    ("config --r", "--r needs a value"),
    ("config --r many", "r"),
    ("train -r 4", "options have two dashes: --r"),
    ("plot --metric lost", "--metric: did you mean 'loss'? It is one of loss, grad_norm, "),
    ("plot --metric weather", "--metric: it is one of loss, grad_norm, "),
    ("bench --speed 3", "bench has no option --speed; it has --seconds"),
    ("load tyny", "no model 'tyny': there is no such folder, and names on the hub are organisation/name; did you mean 'tiny'?"),
    ("data tini", "no data 'tini': there is no such file, folder or variable; did you mean 'tiny/'?"),
    ("load tiny\nplan --on 2xT5", "no device 'T5' is known (did you mean 'T4'?); there are T4, "),
    ("config --load nowhere.json", "nowhere.json: there is no such file"),
    ("config r 8", "settings have two dashes: --r"),
    ("save out run-1", "usage: %qlora save [FOLDER]; a run is named by --run"),
    ("load tiny\neval", "no evaluation data: %qlora config --eval_dataset FILE"),
    ("load tiny\ndata tiny --eval_dataset no.jsonl", "eval_dataset: no data 'no.jsonl': there is no such file"),
    ("unload now", "'now' is one word too many; usage: %qlora unload"),
    ("plot --r 4", "plot takes no settings"),
    ("bench --seconds x", "--seconds takes a whole number from 0 on, not 'x'"),
    ("bench --seconds -3", "--seconds takes a whole number from 0 on, not '-3'"),
    ("generate a --temperature nan", "--temperature takes a number from 0 to 1e9, not 'nan'"),
    ("generate a --compare=maybe", "--compare takes true or false, not 'maybe'"),
    ("config --learning_rate {lr}", "there is no variable lr in this notebook"),
    ("config --use_dora true", "DoRA is not supported"),
    ("%%qlora info\nx: 1", "info takes no cell body"),
    ("%%qlora\nload tiny", "the verb stands in the first line: %%qlora config"),
    ("%%qlora config\nr: 4\ncpu_offload: true", "line 2: unknown key 'cpu_offload', it is a key of fsdp_config: {\"cpu_offload\": …}"),
    ("%%qlora config\nr: 4\nlora_rnak: 5", "line 2: unknown key 'lora_rnak', did you mean 'lora_rank'?"),
    ("%%qlora config\nr: 4\n\n", None),
    ("%%qlora config\n# c\n\n", None),
    ("%%qlora config\nr: none of it", "line 1: "),
    ("%%qlora config\n{\"r\": 4,\n\"lora_rnak\": 5}", "line 2: unknown key 'lora_rnak'"),
    ("%%qlora config\n{\"r\": 4", "line "),
    ("%%qlora config\nr: 4\nlora_alpha: 8\nr: 16", "line 3: r is set in line 1 already"),
    ("%%qlora config\nlora:\n  r: 4\nlora_rank: 16", "line 3: r is set in line 2 already"),
    ("%%qlora config\nargs = SFTConfig(\n  r=4,\n)", "line 1: 'SFTConfig(' is not closed: a value stands in one line"),
    ("%%qlora config\nr=4,\ntarget_modules=[\"q_proj\",\n  \"v_proj\"],", "line 2: '[\"q_proj\"' is not closed"),
    ("help lora_alhpa", "did you mean 'lora_alpha'?"),
    ("data", "no data yet"),
    ("train", "no model yet"),
    ("save", "there is no run yet"),
    ("plan --on 2xT5", "load"),
])
def test_errors(line, part, tmp_path):
    if part is None:
        assert shell(line + "\n", tmp_path).returncode == 0
    elif part != "load":
        assert part in error(line, tmp_path)


def test_a_run_with_a_blank_is_named_in_quotes(tmp_path):
    (tmp_path / "runs/a b").mkdir(parents=True)
    (tmp_path / "runs/a b/events.jsonl").write_text("")
    assert '%qlora resume "a b"' in error("load tiny\ndata tiny\ntrain --run_name 'a b'", tmp_path)


def config(text, tmp_path):
    r = shell(text + "\nconfig --save c.json\n", tmp_path)
    assert r.returncode == 0, r.stderr
    return json.loads((tmp_path / "c.json").read_text())


def test_values(tmp_path):
    assert config("config --r 8 --lora_alpha=32 --packing --learning_rate 1e-4", tmp_path) == {"r": 8, "lora_alpha": 32, "packing": True, "learning_rate": 1e-4}
    assert config("config --r 8 --r 16", tmp_path) == {"r": 16}
    assert config("config --packing true --fp16 false", tmp_path) == {"packing": True, "fp16": False}
    assert config("config --no-packing --lora-alpha 4", tmp_path) == {"packing": False, "lora_alpha": 4}
    assert config("config --fsdp", tmp_path)["fsdp"] in (True, "true")
    assert config("config --packing   # and a comment --r 4", tmp_path) == {"packing": True}
    assert config("config --run_name \"a b\";", tmp_path) == {"run_name": "a b"}
    assert config("config --target_modules [\"q_proj\", \"v_proj\"]", tmp_path) == {"target_modules": ["q_proj", "v_proj"]}


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config("%%qlora config\noutput_dir: ~/out  # there\nrun_name: '~'\n", tmp_path) == {"output_dir": f"{tmp_path}/out", "run_name": "~"}


def test_a_setting_is_explained_with_its_dashes(tmp_path):
    r = shell("help --lora_rank\n", tmp_path)
    assert r.returncode == 0 and "rank of the adapters" in r.stdout, r.stderr


def test_a_byte_order_mark(tmp_path):
    assert config("\ufeffconfig --r 8", tmp_path) == {"r": 8}


@pytest.mark.parametrize("no", ["off", "none", "FALSE", "0", "null"])
def test_flags_that_say_no(no, tmp_path):
    assert config(f"config --r 8\nconfig --reset {no}\nconfig --reset={no}", tmp_path) == {"r": 8}


def test_bodies(tmp_path):
    body = "%%qlora config\n# a comment\nlora:\n  r: 8\n  target_modules:\n    - q_proj\n    - v_proj\nmax_steps: 60  # sixty\nrun_name: \"a # b\"\n"
    expected = {"r": 8, "target_modules": ["q_proj", "v_proj"], "max_steps": 60, "run_name": "a # b"}
    assert config(body, tmp_path) == expected
    assert config("%%qlora config\n" + json.dumps({"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}, "max_steps": 60, "run_name": "a # b"}) + "\n",
                  tmp_path) == expected


def test_config_keeps_resets_and_reads_files(tmp_path):
    assert config("config --r 8\nconfig --max_steps 5", tmp_path) == {"r": 8, "max_steps": 5}
    assert config("config --load c.json --r 9", tmp_path) == {"r": 9, "max_steps": 5}
    assert list(config("load tiny\nconfig --r 9\nconfig --reset", tmp_path)) == ["model"]
    # What fails changes nothing.
    assert shell("config --r 8 --lora_alpha x\n", tmp_path).returncode == 1


def test_a_full_disk_leaves_the_saved_settings(tmp_path):
    config("config --r 8", tmp_path)
    before = (tmp_path / "c.json").read_bytes()
    r = subprocess.run([str(BUILD / "qlora"), "-c", "config --r 8 --max_steps 5 --run_name " + "a" * 60, "-c", "config --save c.json"], cwd=tmp_path,
                       env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL,
                       preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))))
    assert r.returncode == 1 and "c.json cannot be written: File too large" in r.stderr, r.stderr
    assert (tmp_path / "c.json").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_settings_of_train_are_for_that_run(tmp_path):
    r = shell("load tiny\ndata tiny\ntrain --max_steps 3 --seed 9\nconfig --save c.json\n", tmp_path)
    assert r.returncode == 0, r.stderr
    assert json.loads((tmp_path / "runs/run-1/job.json").read_text())["seed"] == 9
    assert "seed" not in json.loads((tmp_path / "c.json").read_text())


def test_settings_may_wait_for_the_data(tmp_path):
    r = shell("config --eval_strategy steps\n", tmp_path)
    assert r.returncode == 0 and "eval_dataset" in r.stdout
    # With data that brings no evaluation set it is an error.
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    r = shell("load tiny\ndata d.jsonl\nconfig --eval_strategy steps\n", tmp_path)
    assert r.returncode == 1 and "eval_dataset" in r.stderr


@pytest.mark.parametrize("line,name,value", [
    ("learning_rate = 3e-4,", "learning_rate", 3e-4),
    ("bf16=True,   # as in SFTConfig(…)", "bf16", True),
    ("optim='adamw_8bit',", "optim", "adamw_8bit"),
    ("target_modules=['q_proj', 'v_proj'],", "target_modules", ["q_proj", "v_proj"]),
    ("target_modules: [q_proj, v_proj]", "target_modules", ["q_proj", "v_proj"]),
    ("\"fsdp_config\": {\"cpu_offload\": true},", "fsdp_config", {"cpu_offload": True}),
])
def test_pasted_python(line, name, value, tmp_path):
    assert config("%%qlora config\n" + line + "\n", tmp_path)[name] == value


def test_not_even_python(tmp_path):
    assert "must be valid JSON" in error("%%qlora config\ntarget_modules: ['a b']\n", tmp_path)
