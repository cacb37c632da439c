"""build/qlora: verbs from stdin, text/plain out, and a client that survives every kind of engine."""
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
import xml.etree.ElementTree as ET

import clock
import pytest
from front_end import BUILD, FAKE, ROOT, environment, shell

SETUP = "load tiny\ndata tiny\nconfig --devices 0,1\n"


def width(text):
    return max(len(line) for line in text.splitlines())


def test_every_verb_fits_80_columns(tmp_path):
    text = "info\nload tiny\n%%qlora config\nr: 64\nmax_steps: 24\n\nconfig --all\ndata tiny\nplan --on 2xT4\ntrain\neval\nmemory\nplot\nplot --metric memory\n"
    text += "verify\ngenerate \"a b\" --compare\nsave out\nunload\nhelp\n"
    verbs = "info bench load config data plan train resume eval generate plot memory baseline verify save unload help".split()
    r = shell(text + "".join(f"help {v}\n" for v in verbs), tmp_path, "fp16 warn")
    assert r.returncode == 0, r.stderr
    long = [line for line in r.stdout.splitlines() if len(line) > 80 and str(FAKE) not in line and str(ROOT) not in line]
    assert not long, long
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert (tmp_path / "runs" / "run-1" / "job.json").exists()


def test_steps_as_lines(tmp_path):
    r = shell(SETUP + "train --max_steps 20\n", tmp_path)
    assert "step  1/20  loss 3.2181" in r.stdout
    assert "eval_loss 2.4042 at step 10" in r.stdout
    assert "done: run-1: 20 steps" in r.stdout


def test_bundled_names_come_before_folders_here(tmp_path):
    """As in notebooks/ itself, where the bundled model lies as ./tiny."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "rows.jsonl").write_text('{"text": "mine"}\n')
    r = shell("load tiny\ndata tiny\n", tmp_path)
    assert r.returncode == 0 and "918,656 parameters" in r.stdout, r.stdout + r.stderr
    r = shell("load ./tiny\n", tmp_path)
    assert r.returncode == 1 and "config.json" in r.stderr, r.stdout + r.stderr


def test_errors_end_the_file(tmp_path):
    r = shell("trian\nhelp\n", tmp_path)
    assert r.returncode == 1 and "did you mean 'train'?" in r.stderr and "VERB" not in r.stdout


@pytest.mark.parametrize("how,text", [
    ("abort", ["SIGABRT", "illegal memory access", "at rank 1, step 5", "fresh engine"]),
    ("kill", ["SIGKILL", "out-of-memory"]),
    ("oom", ["rank 1, step 5: needs 1.2 GiB", "--max_length 1024 fits"]),
    ("die-at-start", ["exit status 127", "libcudart.so.12"]),
    ("other-version", ["9.9.9", "0.1.0"]),
    ("noise", ["no events"]),
    ("endless", ["more than 256 MiB"]),
])
def test_engine_failures(tmp_path, how, text):
    r = shell(SETUP + "train --max_steps 20\n", tmp_path, how)
    assert r.returncode == 1
    for part in text:
        assert part in r.stderr, r.stderr


@pytest.mark.parametrize("how", ["garbage", "huge", "flood", "nan", "fp16"])
def test_engine_oddities_are_survived(tmp_path, how):
    r = shell(SETUP + "train --max_steps 12\n", tmp_path, how)
    assert r.returncode == 0, r.stderr
    assert "12/12" in r.stdout


def test_missing_engine(tmp_path):
    r = shell(SETUP + "train\n", tmp_path, engine="/nowhere/qlora-engine")
    assert r.returncode == 1 and "/nowhere/qlora-engine does not start: No such file" in r.stderr


def start(tmp_path, text, how, engine=FAKE):
    p = subprocess.Popen([str(BUILD / "qlora")], cwd=tmp_path, env=environment(how, engine), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    p.stdin.write(text)
    p.stdin.close()
    return p


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def stop(p):
    """Pressed again and again, until it ends: two presses in a moment in which it does not run are one."""
    def pressed():
        p.send_signal(signal.SIGINT)
        time.sleep(0.3)
        return p.poll() is not None
    assert clock.wait_for(pressed)
    return p.returncode


def wait_for(p, part):
    seen = ""
    while part not in seen:
        line = p.stdout.readline()
        assert line, seen
        seen += line
    return seen


def test_stop_names_checkpoint_and_resume(tmp_path):
    p = start(tmp_path, SETUP + "train --max_steps 1000\n", "pace=0.02")
    wait_for(p, "loss")
    time.sleep(0.2)
    since = clock.Clock()
    p.send_signal(signal.SIGINT)
    err = p.stderr.read()
    assert p.wait(60) == 130 and since.seconds() < 2
    assert "stopped at step" in err and "checkpoint-" in err and "%qlora resume run-1" in err
    step = int(re.search(r"stopped at step (\d+)", err)[1])
    r = shell(SETUP + f"resume run-1 --max_steps {step + 20}\nplot run-1\n", tmp_path, "pace=0.001")
    assert r.returncode == 0, r.stderr
    events = [json.loads(x) for x in open(tmp_path / "runs/run-1/events.jsonl")]
    assert any(e["ev"] == "start" and e["resumed"] > 0 for e in events)


def test_third_stop_kills(tmp_path):
    p = start(tmp_path, SETUP + "train --max_steps 1000\n", "pace=0.02 ignore-stop")
    wait_for(p, "loss")
    engine = clock.children(p.pid)[0]
    assert stop(p) == 130 and "third stop" in p.stderr.read()
    assert clock.wait_for(lambda: gone(engine))


def test_dead_front_end_leaves_no_engine(tmp_path):
    p = start(tmp_path, SETUP + "train --max_steps 100000\n", "pace=0.02")
    wait_for(p, "loss")
    engine = clock.children(p.pid)[0]
    p.kill()
    p.wait()
    assert clock.wait_for(lambda: gone(engine))


def test_hung_engine_can_be_stopped(tmp_path):
    p = start(tmp_path, SETUP + "train --max_steps 20\n", "hang")
    wait_for(p, "loss")
    time.sleep(0.3)
    assert stop(p) == 130


def test_engine_gets_one_blas_thread_and_no_extra_descriptors(tmp_path):
    p = start(tmp_path, SETUP + "train --max_steps 1000\n", "pace=0.02")
    wait_for(p, "loss")
    engine = clock.children(p.pid)[0]
    env = open(f"/proc/{engine}/environ").read().split("\0")
    assert env.count("OPENBLAS_NUM_THREADS=1") == 1
    fds = {os.readlink(f"/proc/{engine}/fd/{f}") for f in os.listdir(f"/proc/{engine}/fd")}
    assert sum("socket" in f for f in fds) == 1 and os.getpgid(engine) == engine
    p.send_signal(signal.SIGINT)
    p.wait(60)


def test_baseline_says_same_bits(tmp_path):
    r = shell(SETUP + "train --max_steps 30\nbaseline --steps 20\nplot run-1 run-1-baseline --save d.svg\n", tmp_path)
    assert r.returncode == 0, r.stderr
    assert "20/20 losses: same bits" in r.stdout and "gradient_accumulation_steps 2" in r.stdout
    assert (tmp_path / "d.svg").read_text().startswith("<svg")
    r = shell(SETUP + "train --max_steps 30\nbaseline --steps 20\n", tmp_path, "drift")
    assert "0/20 losses: same bits; largest difference" in r.stdout


def test_a_baseline_of_no_steps(tmp_path):
    """All of the run's steps were done, and none of them compared."""
    r = shell(SETUP + "train --max_steps 30\nbaseline --steps 0\n", tmp_path)
    assert r.returncode == 1 and "--steps takes a whole number from 1 on" in r.stderr and not (tmp_path / "runs" / "run-1-baseline").exists()


def test_plot_takes_trainer_states(tmp_path):
    (tmp_path / "theirs").mkdir()
    rows = [{"step": i, "loss": 3.0 / i, "epoch": 0.1} for i in range(1, 9)] + [{"step": 8, "train_runtime": 1.0}]
    (tmp_path / "theirs" / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    r = shell("plot theirs/trainer_state.json\n", tmp_path)
    assert r.returncode == 0 and "theirs" in r.stdout, r.stderr
    assert "no run 'rnu-1'" in shell("plot rnu-1\n", tmp_path).stderr


def test_quick(tmp_path):
    seconds = []
    for _ in range(5):
        since = clock.Clock()
        shell("help\n", tmp_path)
        seconds.append(since.seconds())
    assert sorted(seconds)[2] < 0.2, seconds


REAL = BUILD / "qlora-engine"


def test_a_stopped_run_speaks_from_its_checkpoint(tmp_path):
    """As a stop leaves it: checkpoints, and no adapter in the run's own folder."""
    r = shell("load tiny\ndata tiny\ntrain --max_steps 2 --save_steps 1 --max_length 64\n", tmp_path, engine=REAL)
    assert r.returncode == 0, r.stderr
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "runs/run-1" / name).unlink()
    r = shell('load tiny\ndata tiny\nconfig --max_length 64\neval run-1\ngenerate "A goat" --run run-1 --max_new_tokens 3\nsave out --run run-1\n',
              tmp_path, engine=REAL)
    assert r.returncode == 0 and "eval_loss" in r.stdout and (tmp_path / "out/adapter_config.json").exists(), r.stderr


def test_a_run_of_another_day(tmp_path):
    """A new notebook: the run is named, its model and data are known; without a name the newest is offered, never taken."""
    assert "there is no run yet" in shell("resume\n", tmp_path).stderr
    r = shell("load tiny\ndata tiny\ntrain --max_steps 2 --max_length 64\n", tmp_path, engine=REAL)
    assert r.returncode == 0, r.stderr
    assert "the newest in runs/ is 'run-1'" in shell("resume\n", tmp_path).stderr
    assert "save, merge and generate: --run run-1" in shell("save run-1\n", tmp_path).stderr
    assert "did you mean 'run-1'?" in shell("resume run-2\n", tmp_path).stderr
    r = shell("eval run-1\nsave out --run run-1\nresume run-1\n", tmp_path, engine=REAL)
    assert r.returncode == 0 and f'from_pretrained("{ROOT}/notebooks/tiny")' in r.stdout, r.stdout + r.stderr
    assert "nothing to resume: run-1 is done, step 2 of 2" in r.stdout and "%qlora resume run-1 --max_steps N" in " ".join(r.stdout.split())
    # Settings that nothing was trained with are not the run's.
    job = json.loads((tmp_path / "runs/run-1/job.json").read_text())
    r = shell("resume run-1 --max_steps 1 --learning_rate 0.5\n", tmp_path, engine=REAL)
    assert "nothing to resume" in r.stdout and json.loads((tmp_path / "runs/run-1/job.json").read_text()) == job, r.stdout + r.stderr


def test_a_run_that_goes_on_from_an_earlier_checkpoint(tmp_path):
    """What lies beyond is of the course that was left: it is told, and a limit removes it before what was just saved."""
    r = shell("load tiny\ndata tiny\ntrain --max_steps 6 --save_steps 2 --max_length 64\nresume runs/run-1/checkpoint-2 --max_steps 3\n", tmp_path, engine=REAL)
    assert r.returncode == 0 and "! runs/run-1 has checkpoints beyond checkpoint-2: the run's name alone" in r.stdout, r.stdout + r.stderr
    r = shell("resume runs/run-1/checkpoint-3 --max_steps 3\n", tmp_path, engine=REAL)
    assert "on from there: %qlora resume runs/run-1/checkpoint-3 --max_steps N" in " ".join(r.stdout.split()), r.stdout + r.stderr
    r = shell("resume runs/run-1/checkpoint-3 --max_steps 5 --save_total_limit 2\n", tmp_path, engine=REAL)
    assert r.returncode == 0, r.stderr
    assert sorted(p.name for p in (tmp_path / "runs/run-1").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    assert "beyond" not in shell("resume runs/run-1/checkpoint-5\n", tmp_path, engine=REAL).stdout


def test_an_engine_that_died_before_a_checkpoint(tmp_path):
    r = shell(SETUP + "train --max_steps 20\n", tmp_path, "abort")
    assert r.returncode == 1
    assert "no adapter: it ended before its first checkpoint" in shell(SETUP + "eval run-1\n", tmp_path).stderr
    assert "no whole checkpoint to go on from" in shell(SETUP + "resume run-1\n", tmp_path).stderr
    with open(tmp_path / "runs/run-1/events.jsonl") as f:   # as an engine that trains there has it
        fcntl.flock(f, fcntl.LOCK_EX)
        assert "no adapter yet: it is being trained elsewhere" in shell(SETUP + "eval run-1\n", tmp_path).stderr
        assert "being trained elsewhere" in shell(SETUP + "resume run-1\n", tmp_path).stderr


def test_unload_says_what_it_did(tmp_path):
    r = shell("load tiny\ndata tiny\nunload\ntrain --max_steps 1 --max_length 64\nunload\nunload\n", tmp_path, engine=REAL)
    assert r.returncode == 0, r.stderr
    said = [line for line in r.stdout.splitlines() if "freed" in line or "nothing was" in line]
    assert said == ["nothing was loaded", "devices freed · model, settings and runs stay", "nothing was loaded"]


def test_marks_of_what_is_trained_on(tmp_path):
    """The first token is predicted by nothing; marks stand between characters, not bytes."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "é 你好", "completion": " où é"}\n{"text": 5}\n')
    (tmp_path / "t.jsonl").write_text('{"text": "hi"}\n{"text": 5}\n')
    r = shell("load tiny\ndata d.jsonl\ndata t.jsonl\n", tmp_path)
    assert r.returncode == 0, r.stderr
    assert "  | <|begin_of_text|>é 你好‹ où é<|end_of_text|>›" in r.stdout
    assert "  | <|begin_of_text|>‹hi<|end_of_text|>›" in r.stdout
    assert "! 1 row left out: no text; the first: row 2: " in r.stdout


@pytest.mark.parametrize("text,part", [
    ('{"text": 5}', "the column 'text' must hold text; in the first row it is a whole number"),
    ('{"a;b": "1;2"}', "parted by ';'"),
    ('{"a": "1"}', "the column 'a' is none of: text;"),
    ('{"a": "1", "b": 2}', "the columns 'a', 'b' are none of: text;"),
])
def test_columns_that_are_not_text(tmp_path, text, part):
    (tmp_path / "d.jsonl").write_text(text + "\n")
    assert part in shell("load tiny\ndata d.jsonl\n", tmp_path).stderr
    r = shell("load tiny\ndata d.jsonl --dataset_text_field nope\n", tmp_path)
    assert f"dataset_text_field: there is no column 'nope'; there {'are' if ',' in text else 'is'} '" in r.stderr


@pytest.mark.parametrize("rows,settings,part", [
    (['{"text": "hello"}'], "--max_length 3", "! 1 of 1 sample (100.0 %) was cut to max_length and loses its end"),
    (['{"text": "hello"}', '{"text": "h"}'], "--max_length 3", "! 1 of 2 samples (50.0 %) was cut to max_length and loses its end"),
    (['{"text": "hello"}'] * 2, "--max_length 3", "! 2 of 2 samples (100.0 %) were cut to max_length and lose their end"),
    (['{"input_ids": [5, 6, 7]}'], "", "! 1 sample does not end with a trained <|end_of_text|>"),
    (['{"input_ids": [5, 6, 7]}'] * 2, "", "! 2 samples do not end with a trained <|end_of_text|>"),
    (['{"text": "<|begin_of_text|>a"}'], "", "! 1 sample begins with two <|begin_of_text|>"),
    (['{"text": ""}'], "", "the only row cannot be trained on: 1 x empty"),
    (['{"text": ""}'] * 2, "", "none of the 2 rows can be trained on: 2 x empty"),
])
def test_one_row_and_two(tmp_path, rows, settings, part):
    (tmp_path / "d.jsonl").write_text("\n".join(rows) + "\n")
    r = shell(f"load tiny\ndata d.jsonl {settings}\n", tmp_path)
    assert part in " ".join((r.stdout + r.stderr).split())


def test_callbacks_are_not_denied(tmp_path):
    r = shell("help restore_callback_states_from_checkpoint\n", tmp_path)
    assert "no effect here: what callbacks keep is not in a checkpoint" in " ".join(r.stdout.split()), r.stdout


def test_one_step_on_one_device(tmp_path):
    r = shell("load tiny\ndata tiny\nconfig --devices cpu:1 --per_device_train_batch_size 1 --max_length 64 --max_steps 1\ntrain\nverify\n", tmp_path,
              engine=BUILD / "qlora-engine")
    assert r.returncode == 0, r.stderr
    text = " ".join(r.stdout.split())
    assert "1 × 1 × 1 device = 1 sample per step" in text and "run-1: 1 step on 1 × cpu" in text and "run-1: 1 step in" in text
    assert "1 record up to step 1" in text


@pytest.mark.parametrize("how", [["-h"], ["--help"], ["--version"]])
def test_how_it_is_called(tmp_path, how):
    r = subprocess.run([str(BUILD / "qlora"), *how], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0 and "qlora -c 'load tiny'" in r.stdout and ("generate [PROMPT" in r.stdout) == (how != ["--version"])
    r = subprocess.run([str(BUILD / "qlora"), "train"], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 1 and "a verb is given as -c 'train'" in r.stderr


@pytest.mark.parametrize("arguments,code,part", [
    (["-c", "# both\nconfig --r 4\n%%qlora config\nlora_alpha: 7\n\nconfig --save c.json"], 0, ""),
    (["-c", ""], 0, ""),
    (["-c"], 1, "qlora: -c needs a verb"),
    (["--foo"], 1, "qlora: there is no option --foo"),
    (["."], 1, "qlora: .: Is a directory"),
])
def test_its_arguments(tmp_path, arguments, code, part):
    r = subprocess.run([str(BUILD / "qlora"), *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == code and part in r.stderr and bool(part) == bool(r.stderr)
    if "c.json" in "".join(arguments):
        assert json.loads((tmp_path / "c.json").read_text()) == {"r": 4, "lora_alpha": 7}


def test_a_terminal_is_asked_and_survives_errors(tmp_path):
    terminal, end = pty.openpty()
    p = subprocess.Popen([str(BUILD / "qlora")], cwd=tmp_path, env=environment(), stdin=end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.close(end)
    os.write(terminal, b"trian\nhelp help\n\x04")
    out, err = p.communicate(timeout=300)
    os.close(terminal)
    assert p.returncode == 0 and "did you mean 'train'?" in err
    assert out.count("qlora> ") == 3 and "%qlora help [VERB or SETTING]" in out


def test_a_long_name_is_cut_between_characters(tmp_path):
    name = "ü" * 45 + "x"   # of 91 bytes; a baseline keeps 80, which end in half a character where it begins with one byte more
    for n in (name, "x" + name):
        r = shell(SETUP + f"train --max_steps 3 --run_name {n}\nbaseline --steps 2\nplot {n} {n[:40]}-baseline --save d.svg\n", tmp_path)
        assert r.returncode == 0 and "2/2 losses: same bits" in r.stdout, r.stdout + r.stderr
        ET.parse(tmp_path / "d.svg")


def test_two_notebooks_in_a_folder_have_runs_of_their_own(tmp_path):
    first = start(tmp_path, SETUP + "train --max_steps 5\n", "wait-for-go")   # its engine has written nothing yet
    for _ in range(3000):
        if (tmp_path / "runs/run-1").exists():
            break
        time.sleep(0.01)
    r = shell(SETUP + "train --max_steps 5\n", tmp_path)
    (tmp_path / "go").touch()
    out, err = first.stdout.read(), first.stderr.read()
    assert first.wait(60) == 0 and "done: run-1: 5 steps" in out, err
    assert "done: run-2: 5 steps" in r.stdout, r.stdout + r.stderr


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    r = shell(SETUP + "train\n", tmp_path, engine="/nowhere/qlora-engine")
    assert r.returncode == 1 and not (tmp_path / "runs/run-1").exists()


def test_evaluation_data_by_name(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "hi"}\n')
    r = shell("config --eval_dataset mine.jsonl --save c.json\nconfig --eval_dataset no.jsonl\n", tmp_path)
    assert "eval_dataset: no data 'no.jsonl': there is no such file, folder or variable" in r.stderr
    assert json.loads((tmp_path / "c.json").read_text())["eval_dataset"] == "mine.jsonl"


def test_ids_beyond_the_vocabulary_are_told_before_a_run(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": "1, 2"}\n')
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2, 1023]}\n{"input_ids": [1, 1024, 2]}\n')
    for line, said in (("data a.jsonl", "the column 'input_ids' must hold a list of token ids"),
                       ("data b.jsonl", "token id 1024 in the data; the model's vocabulary ends at 1023"),
                       ("eval --eval_dataset b.jsonl", "token id 1024 in the data; the model's vocabulary ends at 1023")):
        r = shell(f"load tiny\n{line}\n", tmp_path, engine=REAL)
        assert r.returncode == 1 and said in r.stderr, r.stderr
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2, 1023]}\n')
    assert shell("load tiny\ndata b.jsonl\n", tmp_path, engine=REAL).returncode == 0


def test_a_folder_is_evaluated_by_its_own_split(tmp_path):
    """Validation, else test; what is for training only where there is nothing else. A bundled name by its eval.jsonl, as `data` takes it."""
    for name, text in (("train", "a goat"), ("validation", "an old pirate ship"), ("test", "beans")):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")

    def losses(*data):
        r = shell("load tiny\n" + "".join(f"eval --eval_dataset {d}\n" for d in data), tmp_path, engine=REAL)
        assert r.returncode == 0, r.stderr
        return re.findall(r"eval_loss (\S+)", r.stdout)
    whole, validation, test, train = losses("d", "d/validation.jsonl", "d/test.jsonl", "d/train.jsonl")
    assert whole == validation and len({validation, test, train}) == 3
    (tmp_path / "d/validation.jsonl").unlink()
    assert losses("d") == [test]
    (tmp_path / "d/test.jsonl").unlink()
    assert losses("d") == [train]
    shell("load tiny\nconfig --eval_dataset tiny --save c.json\n", tmp_path)
    assert json.loads((tmp_path / "c.json").read_text())["eval_dataset"] == str(ROOT / "notebooks/tiny/eval.jsonl")


def test_load_reads_headers_and_says_what_is_there(tmp_path):
    """A file that is cut short is an error of load, not of the run that comes later; config.json alone is enough for a plan, and said so."""
    import shutil
    tiny = ROOT / "notebooks/tiny"
    for name in ("cut", "part", "bin", "config"):
        (tmp_path / name).mkdir()
        shutil.copy(tiny / "config.json", tmp_path / name)
    (tmp_path / "cut/model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:200000])
    (tmp_path / "part/model-00001-of-00002.safetensors").write_text("")
    (tmp_path / "bin/pytorch_model.bin").write_text("")
    for name, part in (("cut", "the file is cut short, get it again"), ("part", "neither model.safetensors nor"), ("bin", "pytorch_model.bin only")):
        r = shell(f"load {name}\n", tmp_path)
        assert r.returncode == 1 and part in r.stderr, r.stdout + r.stderr
    r = shell(f"load config\nplan\nload {ROOT}/tests/golden/qwen3/model\n", tmp_path, engine=REAL)
    assert r.returncode == 0 and "! config.json alone, without weights: enough for %qlora plan" in r.stdout, r.stderr
    assert "stored as     bfloat16" in r.stdout and "stored as     float32" in r.stdout and "base of 436 KiB once placed" in r.stdout


def test_what_has_no_effect_is_said_on_any_line(tmp_path):
    r = shell("load tiny\ndata tiny\ntrain --max_steps 1 --max_length 64 --report_to wandb --eval_steps 2\n"
              "resume run-1 --max_steps 2 --torch_compile true\n", tmp_path, engine=REAL)
    assert "! report_to: accepted, nothing is sent anywhere" in r.stdout and r.stdout.count("! torch_compile: ") == 1, r.stdout + r.stderr
    assert "! eval_steps: has no effect while eval_strategy is no; --eval_strategy steps" in r.stdout
    r = shell("config --report_to wandb\nload tiny\ndata tiny\ntrain --max_steps 3\n", tmp_path)
    assert r.stdout.count("report_to: ") == 1, r.stdout   # config has said it


def test_a_stopped_run_goes_on_with_its_own_settings(tmp_path):
    """Settings of train's own line hold for the run: resume has them, also in another notebook."""
    text = "load tiny\ndata tiny\ntrain --max_steps 100000 --max_length 64 --learning_rate 3e-4 --save_steps 1 --save_total_limit 2\n"
    p = start(tmp_path, text, "", REAL)
    wait_for(p, "step ")
    job = json.loads((tmp_path / "runs/run-1/job.json").read_text())
    assert job["max_steps"] == 100000 and job["learning_rate"] == 3e-4
    wait_for(p, "checkpoint ")
    p.send_signal(signal.SIGINT)
    err = p.stderr.read()
    assert p.wait(30) == 130
    step = int(err.split("stopped at step ")[1].split(";")[0])
    r = shell(f"resume run-1 --max_steps {step + 1}\nconfig --load runs/run-1/job.json --save c.json\n", tmp_path, engine=REAL)
    assert r.returncode == 0 and f"! max_steps: 100000 in the checkpoint, {step + 1} now" in r.stdout, r.stdout + r.stderr
    assert r.stdout.count("in the checkpoint") == 1
    job = json.loads((tmp_path / "c.json").read_text())
    assert job["max_steps"] == step + 1 and job["learning_rate"] == 3e-4 and job["save_total_limit"] == 2


def test_ctrl_c_where_a_line_is_asked_for(tmp_path):
    """It drops what was typed, a cell's lines as well; the shell, its settings and its engine stay."""
    ours, theirs = pty.openpty()
    p = subprocess.Popen([str(BUILD / "qlora")], cwd=tmp_path, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs,
                         preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)))
    os.close(theirs)
    said = b""

    def say(text, until):
        nonlocal said
        os.write(ours, text)
        at, end = len(said), time.time() + 60
        while until not in said[at:] and time.time() < end:
            said += os.read(ours, 65536)
        assert until in said[at:], said.decode()

    say(b"load tiny\n", b"qlora> ")
    say(b"nonsense\x03", b"\r\nqlora> ")
    say(b"%%qlora config\n", b"     > ")
    say(b"r: 3\n", b"     > ")
    say(b"\x03", b"\r\nqlora> ")
    say(b"config\n", b"set: by you")
    os.write(ours, b"\x04")
    assert p.wait(60) == 0 and b"Interrupted" not in said and b"nonsense'" not in said and "r                            16" in said.decode()
    os.close(ours)
