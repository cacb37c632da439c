"""generate on the real engine: the tokens that transformers' generate takes on the golden models, from every store; chats; the bare base;
what is wrong with a prompt."""
import json
import shutil
import signal
import struct
import subprocess
import time

import pytest
from engine import TINY, Engine, job
from front_end import BUILD, ROOT, environment, shell

GOLDEN = ROOT / "tests" / "golden"
CASES = json.loads((GOLDEN / "generate.json").read_text())
STORES = {"resident": {}, "16 bit": {"store": "resident16"}, "sharded": {"devices": "cpu:2", "store": "sharded"}, "host": {"store": "host"},
          "host, two ranks": {"devices": "cpu:2", "store": "host"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    e = Engine(tmp_path_factory.mktemp("generate"))
    yield e
    e.close()


def golden_job(case, **settings):
    # A micro-batch of 64 tokens: the longest prompt takes two.
    return dict({"model": str(GOLDEN / case["model"]), "devices": "cpu:1", "load_in_4bit": False, "per_device_train_batch_size": 1,
                 "max_length": 64}, **settings)


def check(engine, case, **settings):
    r = engine.ask("generate", job=golden_job(case, **settings), prompts=case["prompts"], max_new_tokens=case["max_new_tokens"],
                   adapter=case["adapter"] and str(GOLDEN / case["adapter"]), repetition_penalty=case["repetition_penalty"])
    assert r["tokens"] == case["answers"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['model']}{'+adapter' if c['adapter'] else ''}-{c['repetition_penalty']}")
def test_greedy_is_transformers(engine, case):
    check(engine, case)


@pytest.mark.parametrize("store", [s for s in STORES if s != "resident"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_from_every_store(engine, family, store):
    case = next(c for c in CASES if c["model"] == f"{family}/model-nf4" and c["adapter"] and c["repetition_penalty"] == 1)
    check(engine, case, **STORES[store])


def texts(engine, prompts, **fields):
    return engine.ask("generate", **dict({"job": job(data=None), "adapter": None, "prompts": prompts, "max_new_tokens": 24}, **fields))["texts"]


PROMPTS = ["Mira was a", "Weather for", "Recipe: apples pie", "The capital of", "Two and", "Sunday", "A hat", "Emil", "Rain", "Bread and"]


def test_a_prompt_does_not_feel_the_others(engine):
    how = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1, "seed": 11}
    together = texts(engine, PROMPTS, **how)
    assert len(set(together)) > 5 and together == texts(engine, PROMPTS, **how)
    assert together[0] == texts(engine, PROMPTS[:1], **how)[0] and together[:3] == texts(engine, PROMPTS[:3], **how)
    assert together != texts(engine, PROMPTS, **{**how, "seed": 12})


def test_any_number_of_tokens_ends_an_answer(engine, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())

    def answer(*stops):
        (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": list(stops)}))
        return engine.ask("generate", job=job(data=None, model=str(folder)), adapter=None, prompts=["Mira was a"], max_new_tokens=8)["tokens"][0]
    whole = answer()
    others = [i for i in range(100) if i not in whole]
    assert answer(*others[:40], whole[3]) == whole[:whole.index(whole[3])]


def test_pieces_make_the_text(engine):
    events, end = engine.run("generate", job=job(data=None), adapter=None, prompts=PROMPTS[:3], max_new_tokens=24)
    pieces = ["", "", ""]
    for e in events:
        if e["ev"] == "token":
            pieces[e["prompt"]] += e["text"]
    assert pieces == end["result"]["texts"]


def test_chats(engine, tmp_path):
    header = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
    def said(*messages):
        return "".join(header.format(m["role"], m["content"]) + "<|eot_id|>" for m in messages) + header.format("assistant", "")
    brief, hello, pie = ({"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "Hello there"), ("user", "Apple pie?")))
    # The tokenizer puts the begin token before a plain prompt; the template does so itself.
    assert texts(engine, [], messages=[[hello], [brief, pie]]) == texts(engine, [said(hello), said(brief, pie)])
    # Another template: by its text, by the file that holds it, by name.
    mine = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }}!{% endfor %}"
    (tmp_path / "mine.jinja").write_text(mine)
    want = texts(engine, ["<user> Hello there!"])
    for given in (mine, str(tmp_path / "mine.jinja")):
        assert texts(engine, [], messages=[[hello]], job=job(data=None, chat_template=given)) == want
    want = texts(engine, ["### Instruction:\nHello there\n\n### Response:\n"])
    assert texts(engine, [], messages=[[hello]], job=job(data=None, chat_template="alpaca")) == want
    events, end = engine.run("generate", job=job(data=None, chat_template="vicuna"), prompts=[], messages=[[hello]])
    assert end["ev"] == "error" and "'vicuna' is no template, no file, and none of chatml" in end["text"]


def test_no_adapter_is_the_base(engine, tmp_path):
    base = texts(engine, PROMPTS[:2])
    run = engine.ask("train", job=job(learning_rate=0.1, max_steps=8), run=str(tmp_path / "run"))
    r = engine.ask("generate", job=job(), adapter=run["adapter"], prompts=PROMPTS[:2], max_new_tokens=24, compare=True)
    assert r["base"] == base != r["texts"]
    assert texts(engine, PROMPTS[:2]) == base
    # The devices still hold what training left there.
    checks = engine.ask("verify", job=job(learning_rate=0.1, max_steps=8), run=str(tmp_path / "run"))["checks"]
    assert all(c["ok"] for c in checks) and any(c["name"] == "adapter reloaded" for c in checks), checks


@pytest.mark.parametrize("fields, word", [
    ({"prompts": [[]]}, "prompt 1 is empty"), ({"prompts": []}, "0 prompts"), ({"prompts": [[1, "a"]]}, "list of token ids"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"), ({"temperature": -1}, "temperature"), ({"max_new_tokens": 1e9}, "max_new_tokens must be a number from 0 to 1048576, found 1000000000"),
    ({"prompts": [], "messages": [[{"text": "x"}]]}, "chat template"), ({"prompts": [[5, 99999]]}, "token id 99999")])
def test_what_is_wrong_with_a_prompt(engine, fields, word):
    texts(engine, ["a"], max_new_tokens=1)
    events, end = engine.run("generate", **{"job": job(data=None), "adapter": None, "prompts": ["a"], **fields})
    assert end["ev"] == "error" and word in end["text"]
    # It costs the devices nothing.
    events, end = engine.run("generate", job=job(data=None), adapter=None, prompts=["a"], max_new_tokens=1)
    assert end["ev"] == "done" and not any(e.get("state") == "placing" for e in events)


def test_logits_that_are_not_finite(engine, tmp_path):
    """What float16 does to a model whose activations pass 65504: an error, no answer of the vocabulary's first token."""
    folder = shutil.copytree(GOLDEN / "llama" / "model", tmp_path / "model")
    data = bytearray((folder / "model.safetensors").read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    start, stop = json.loads(data[8:8 + n])["model.norm.weight"]["data_offsets"]
    data[8 + n + start:8 + n + stop] = struct.pack("<H", 0x4880) * ((stop - start) // 2)  # 2^18
    (folder / "model.safetensors").write_bytes(data)
    case = {"model": str(folder)}
    for settings in {"devices": "cpu:1"}, {"devices": "cpu:2", "store": "sharded"}:
        events, end = engine.run("generate", job=golden_job(case, dtype="float16", residual_dtype="float16", **settings), adapter=None,
                                 prompts=[[5, 6, 7], [8]], max_new_tokens=4)
        assert end["ev"] == "error" and "prompt 1, token 1: the model's logits are not finite" in end["text"] and "--run none" in end["text"]
        assert len(engine.ask("generate", job=golden_job(case, dtype="float32", **settings), adapter=None, prompts=[[5, 6, 7]], max_new_tokens=4)["tokens"][0]) == 4


def test_the_shell(tmp_path):
    text = ('load tiny\nconfig --devices cpu:1 --max_steps 3 --learning_rate 0.1 --max_length 64\ndata tiny\n'
            'generate "Mira was a" --compare --max_new_tokens 8\ntrain\n'
            'generate "Mira was a" --run none --max_new_tokens 8\ngenerate "Mira was a" --compare --repetition_penalty 1.2 --max_new_tokens 8\n'
            'generate Hello --system Brief. --max_new_tokens 8\ngenerate Hello --repetition_penalty 0\n')
    r = shell(text, tmp_path, engine=BUILD / "qlora-engine")
    assert r.returncode == 1 and "repetition_penalty must be a number" in r.stderr
    before, after = r.stdout.split("generating\n", 1)[1].split("run-1", 1)
    line = next(x for x in before.splitlines() if x.startswith("Mira was a"))
    assert "without it" not in before and line in after.split("with the adapter")[0]
    assert "without it" in after and "Hello\n\n" in after


def test_the_shell_s_stop_keeps_the_text(tmp_path):
    """The bundled model goes on with "/ the / the" as long as it may."""
    p = subprocess.Popen([str(BUILD / "qlora"), "-c", "load tiny", "-c", "config --devices cpu:1", "-c", "generate B --max_new_tokens 200000"], cwd=tmp_path,
                         env=environment(engine=BUILD / "qlora-engine"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while p.stdout.readline() != "generating\n":
        assert p.poll() is None
    time.sleep(2)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err == "qlora: stopped\n" and out.startswith("B / the / the /"), out[:200] + err
