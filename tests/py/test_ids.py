"""Rows of ids on a model without a tokenizer; what is counted of them; a model whose embedding is wider than its layers' buffers."""
import json
import shutil
import struct

import pytest

import small_model
from engine import Engine

LENGTHS = [9, 30, 5, 17, 22, 11, 40, 3, 26, 14, 8]  # the last micro-batch of two has one row


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    e.close()


@pytest.fixture
def model(tmp_path):
    small_model.rows(tmp_path / "rows.jsonl", LENGTHS)
    return small_model.write(tmp_path / "model")


def job(tmp_path, **more):
    return dict({"model": str(tmp_path / "model"), "data": str(tmp_path / "rows.jsonl"), "devices": "cpu:1", "dtype": "float32", "max_length": 64,
                 "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "train_sampling_strategy": "sequential", "max_steps": 4, "r": 4,
                 "learning_rate": 1e-2, "save_strategy": "no"}, **more)


def train(engine, tmp_path, run, **more):
    events, end = engine.run("train", job=job(tmp_path, **more), run=str(tmp_path / run))
    assert end["ev"] == "done", end
    return [e for e in events if e["ev"] == "step"]


def bits(steps):
    return [(e["loss_bits"], e["grad_norm"]) for e in steps]


def loss(step):
    return struct.unpack("<f", struct.pack("<I", int(step["loss_bits"], 16)))[0]


def state(tmp_path, run):
    return json.loads((tmp_path / run / "trainer_state.json").read_text())


def test_no_tokenizer(engine, tmp_path, model):
    one = train(engine, tmp_path, "one")
    assert len({b for b, _ in bits(one)}) == 4 and loss(one[-1]) < loss(one[0])
    (tmp_path / "text.jsonl").write_text('{"text": "words"}\n')
    events, end = engine.run("train", job=job(tmp_path, data=str(tmp_path / "text.jsonl")), run=str(tmp_path / "no"))
    assert end["ev"] == "error" and "no tokenizer.json" in end["text"] and "rows of input_ids" in end["text"], end
    # Nor does one of a kind that is not read here stand in the way.
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    assert bits(train(engine, tmp_path, "other")) == bits(one)
    events, end = engine.run("train", job=job(tmp_path, data=str(tmp_path / "text.jsonl")), run=str(tmp_path / "neither"))
    assert end["ev"] == "error" and "a Unigram tokenizer is not supported: only BPE is. So the data must be rows of input_ids" in end["text"], end


def test_pieces(engine, tmp_path):
    """A tokenizer of Mistral's kind: trained from chats, prompted with text."""
    small_model.write(tmp_path / "model", vocab=2006)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"tests/text/data/mistral/{name}", tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi  wörld"}, {"role": "assistant", "content": "日本 a"}]}) + "\n")
    steps = train(engine, tmp_path, "pieces", data=str(tmp_path / "chats.jsonl"), chat_template="mistral", per_device_train_batch_size=1,
                  gradient_accumulation_steps=1, max_steps=60)
    assert loss(steps[-1]) < loss(steps[0]) / 4
    events, end = engine.run("generate", job=job(tmp_path, data=None, chat_template="mistral"), adapter=str(tmp_path / "pieces"),
                             prompts=["[INST] Hi  wörld [/INST]"], messages=[[{"role": "user", "content": "Hi  wörld"}]], max_new_tokens=40)
    assert end["result"]["texts"] == ["日本 a"] * 2, end
    assert ["".join(e["text"] for e in events if e["ev"] == "token" and e["prompt"] == i) for i in (0, 1)] == ["日本 a"] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wide_embedding(engine, tmp_path, model, dtype):
    """fp32 rows of 128 against buffers of 64 + r: they pass in pieces, and the bits do not depend on how many ranks there are."""
    one = train(engine, tmp_path, "one", dtype=dtype)
    two = train(engine, tmp_path, "two", dtype=dtype, devices="cpu:2", gradient_accumulation_steps=2, fsdp=True)
    assert bits(one) == bits(two) and 3 < loss(one[0]) < 12


def test_wide_embedding_in_pieces_is_that_at_once(engine, tmp_path, model):
    """A longer row somewhere in the data makes the buffer long enough for all rows of the short ones."""
    small_model.rows(tmp_path / "rows.jsonl", [20] * 8)
    pieces = train(engine, tmp_path, "pieces", max_steps=1)
    small_model.rows(tmp_path / "rows.jsonl", [20] * 8 + [60] * 2)
    assert bits(train(engine, tmp_path, "once", max_steps=1)) == bits(pieces)


def test_a_model_that_was_written_anew(engine, tmp_path, model):
    """Under the same name: what is on the devices is not taken for it."""
    train(engine, tmp_path, "first", max_steps=2)
    (tmp_path / "model").rename(tmp_path / "old")
    small_model.write(tmp_path / "model", dtype="F16", seed=5)
    again = train(engine, tmp_path, "again", max_steps=2)
    engine.ask("unload")
    assert bits(train(engine, tmp_path, "fresh", max_steps=2)) == bits(again)


def params(model, r, hidden=128, ffn=64, layers=2):
    base = sum(n for name, n in model.items() if "embed_tokens" not in name)
    return base + layers * r * (4 * 2 * hidden + 3 * (hidden + ffn))


def padded(groups):
    return sum(len(g) * max(g) for g in groups)


def test_total_flos(engine, tmp_path, model):
    """Trainer.floating_point_ops: 6 · (input_ids, padding included) · (parameters without the embedding), over all steps."""
    epoch = [LENGTHS[i:i + 2] for i in range(0, len(LENGTHS), 2)]  # 6 micro-batches: a step of 4, a step of 2
    want = 6.0 * params(model, 4) * 2 * padded(epoch)
    train(engine, tmp_path, "one")
    train(engine, tmp_path, "two", devices="cpu:2", gradient_accumulation_steps=2)
    for run in ("one", "two"):
        s = state(tmp_path, run)
        assert s["total_flos"] == want == s["log_history"][-1]["total_flos"], (s["total_flos"], want)
    # bfd pads nothing.
    train(engine, tmp_path, "packed", packing=True, num_train_epochs=2, max_steps=-1)
    assert state(tmp_path, "packed")["total_flos"] == 6.0 * params(model, 4) * 2 * sum(LENGTHS)


def test_total_flos_resumed(engine, tmp_path, model):
    train(engine, tmp_path, "whole", save_strategy="steps", save_steps=2)
    events, end = engine.run("train", job=job(tmp_path, save_strategy="steps", save_steps=2), run=str(tmp_path / "again"),
                             resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert end["ev"] == "done", end
    assert state(tmp_path, "again")["total_flos"] == state(tmp_path, "whole")["total_flos"] == 2 * state(tmp_path, "whole/checkpoint-2")["total_flos"]


def test_hf_unshifted(engine, tmp_path, model):
    """Transformers before the fix divides by every label that counts, also by a row's first, which nothing predicts."""
    shifted = train(engine, tmp_path, "shifted")
    older = train(engine, tmp_path, "older", loss_denominator="hf_unshifted")
    rows, tokens = 8, sum(LENGTHS[:8])
    assert loss(older[0]) == pytest.approx(loss(shifted[0]) * (tokens - rows) / tokens, rel=1e-6)
    assert older[0]["grad_norm"] == pytest.approx(shifted[0]["grad_norm"] * (tokens - rows) / tokens, rel=1e-5)
    # The same where prompts are masked, and where documents are packed by bfd.
    small_model.rows(tmp_path / "rows.jsonl", LENGTHS, masked=1)
    assert bits(train(engine, tmp_path, "m1")) == bits(train(engine, tmp_path, "m2", loss_denominator="hf_unshifted"))
    small_model.rows(tmp_path / "rows.jsonl", LENGTHS)
    assert bits(train(engine, tmp_path, "p1", packing=True)) == bits(train(engine, tmp_path, "p2", packing=True, loss_denominator="hf_unshifted"))


def test_skip_modules(engine, tmp_path, model):
    """All seven named: the base is what load_in_4bit false has. Some named: another one, the same on two ranks."""
    everything = ["self_attn", "mlp"]
    plain = train(engine, tmp_path, "plain", load_in_4bit=False)
    assert bits(train(engine, tmp_path, "all", llm_int8_skip_modules=everything)) == bits(plain)
    some = train(engine, tmp_path, "some", llm_int8_skip_modules=["down_proj", "model.layers.0.self_attn"])
    none = train(engine, tmp_path, "none")
    assert len({loss(x[0]) for x in (plain, some, none)}) == 3
    two = train(engine, tmp_path, "two", llm_int8_skip_modules=["down_proj", "model.layers.0.self_attn"], devices="cpu:2", gradient_accumulation_steps=2,
                fsdp=True)
    assert bits(two) == bits(some)
