"""Faults in a rank, at each kind of action and in the middle of a checkpoint: one error that names rank, step and action within six seconds,
nothing left behind, and what was saved goes on to the same bits."""
import json
import os
import pathlib
import re
import shutil
import signal
import threading
import time

import pytest
from clock import Clock, children
from test_engine import BUILD, ENDS, ROOT, Engine, alive

TINY = ROOT / "notebooks" / "tiny"
PROGRAM = str(BUILD / "tests" / "faulty_engine")
# Everything a data-parallel step can consist of; and a pipeline's.
ACTIONS = "GATHER RELEASE BATCH F HEAD R B SAVE LOAD PIECE JOIN REDUCE STEP".split()
SHARDED = {"fsdp": True, "activation_offloading": True, "gradient_checkpointing": True, "save_strategy": "no"}
PIPED = {"pipeline": "1f1b", "save_strategy": "no"}
STAGES = [(0, "SEND_H"), (1, "RECV_H"), (1, "SEND_DH"), (0, "RECV_DH"), (0, "LAND"), (1, "LAND")]


def held(pid):
    """Descriptors, and shared mappings without a name."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len(os.listdir(f"/proc/{pid}/fd")), sum("rw-s" in line and "(deleted)" in line for line in maps)


def leaves_nothing(e, before, pids, works=Engine.works):
    """The engine works, and has what it had before; these ranks are gone."""
    works(e)
    assert not [p for p in pids if alive(p)]
    e.send("unload")
    e.until("done")
    assert held(e.process.pid) == before
    assert not children(e.process.pid)
    e.close()
    assert e.process.returncode == 0


def fails(tmp_path, how, rank, action, **settings):
    """The error of a training whose rank has this fault in step 3; afterwards the engine works."""
    e = Engine(tmp_path, PROGRAM, how, str(rank), action, "3")
    before = held(e.process.pid)
    e.train(**settings)
    e.until("step", when=lambda s: s["step"] == 2)
    pids = children(e.process.pid)
    clock = Clock()
    end = e.until(*ENDS)
    took = clock.seconds()
    assert end["ev"] == "error", end
    leaves_nothing(e, before, pids)
    return end, took


def named(end, rank, action):
    return end["rank"] == rank and end["step"] == 3 and end["action"].startswith(action) and "of step 3" in end["action"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_at_each_action(tmp_path, rank, action):
    how = "segv" if (ACTIONS.index(action) + rank) % 2 else "kill"
    end, took = fails(tmp_path, how, rank, action, **SHARDED)
    assert took < 6 and named(end, rank, action), end
    assert f"signal {int(signal.SIGSEGV if how == 'segv' else signal.SIGKILL)}" in end["text"] and end["action"] in end["text"]
    assert ("host memory runs out" in end["text"]) == (how == "kill"), end


@pytest.mark.parametrize("rank,action", STAGES)
def test_a_stage_dies_at_each_message(tmp_path, rank, action):
    end, took = fails(tmp_path, "kill", rank, action, **PIPED)
    assert took < 6 and named(end, rank, action) and "signal 9" in end["text"], end


@pytest.mark.parametrize("rank,action", [(i % 2, a) for i, a in enumerate(ACTIONS)])
def test_a_rank_has_no_memory_at_each_action(tmp_path, rank, action):
    end, took = fails(tmp_path, "oom", rank, action, **SHARDED)
    assert took < 6 and named(end, rank, action), end
    assert end["status"] == "out of memory" and "made to fail" in end["text"]


@pytest.mark.parametrize("rank,action", [((i + 1) % 2, a) for i, a in enumerate(ACTIONS) if i % 3 == 0])
def test_a_rank_stalls_at_an_action(tmp_path, rank, action):
    end, took = fails(tmp_path, "stall", rank, action, deadline_ms=1500, **SHARDED)
    assert took < 6 and named(end, rank, action) and "deadline_ms" in end["text"], end


@pytest.mark.parametrize("rank,action", STAGES)
def test_a_stage_stalls_at_a_message(tmp_path, rank, action):
    end, took = fails(tmp_path, "stall", rank, action, deadline_ms=1500, **PIPED)
    assert took < 6 and named(end, rank, action) and "deadline_ms" in end["text"], end


def one_works(e):
    """A single rank, which meets nobody."""
    e.train(run="runs/after", max_steps=2, devices="cpu:1")
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]


# The first collectives of a rank are made while loading.
WARMED = [(0, 1, SHARDED), (1, 2, SHARDED), (0, 4, SHARDED), (1, 5, SHARDED), (1, 1, PIPED), (0, 3, PIPED), (1, 4, PIPED), (0, 6, PIPED)]


@pytest.mark.parametrize("rank,nth,how", WARMED)
def test_a_rank_dies_while_collectives_are_warmed(tmp_path, rank, nth, how):
    """In the last moments of loading, among ranks that wait for it."""
    e = Engine(tmp_path, PROGRAM, "kill", str(rank), "collective", str(nth))
    before = held(e.process.pid)
    e.train(**how)
    pids = e.ranks()
    clock = Clock()
    end = e.until(*ENDS)
    assert clock.seconds() < 6 and end["ev"] == "error" and end["rank"] == rank and end["step"] == 0, end
    assert "signal 9" in end["text"] and end["action"].startswith("loading"), end
    leaves_nothing(e, before, pids, works=one_works)


@pytest.mark.parametrize("rank,nth,how", [WARMED[3], WARMED[4]])
def test_a_rank_stalls_while_collectives_are_warmed(tmp_path, rank, nth, how):
    e = Engine(tmp_path, PROGRAM, "stall", str(rank), "collective", str(nth))
    e.train(deadline_ms=200, **how)
    end = e.until(*ENDS)
    assert end["ev"] == "error" and end["rank"] == rank and end["action"].startswith("loading") and "deadline_ms" in end["text"], end
    one_works(e)
    e.close()


@pytest.mark.parametrize("rank,nth,how", WARMED)
def test_a_stop_while_collectives_are_warmed(tmp_path, rank, nth, how):
    """One rank is there late: no error for all that."""
    e = Engine(tmp_path, PROGRAM, "delay", str(rank), "collective", str(nth), "700")
    e.train(**how)
    while not (tmp_path / "delayed").exists():
        time.sleep(0.01)
    e.send("stop")
    end = e.until(*ENDS)
    assert end["ev"] == "stopped" and end["step"] == 0 and end["checkpoint"] is None, end
    e.works()
    e.close()


# The Nth collective of a rank among so many ranks; what was before the first step is left out.
DELAYED = [(2, 0, 20, SHARDED), (2, 0, 23, PIPED), (2, 1, 33, PIPED), (4, 2, 55, SHARDED), (4, 1, 43, PIPED), (4, 3, 28, PIPED)]


@pytest.mark.parametrize("world,rank,nth,how", DELAYED)
def test_a_collective_is_late(tmp_path, whole, world, rank, nth, how):
    """Within the deadline: the others wait, and the bits are the same."""
    e = Engine(tmp_path, PROGRAM, "delay", str(rank), "collective", str(nth), "400")
    e.train(max_steps=8, devices=f"cpu:{world}", gradient_accumulation_steps=4 // world, deadline_ms=60000, **how)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    assert e.losses() == whole
    step = int((tmp_path / "delayed").read_text().split()[0])
    assert [s["seconds"] >= 0.4 for s in e.events if s["ev"] == "step" and s["step"] == step] == [True]
    e.close()
    assert e.process.returncode == 0


@pytest.mark.parametrize("world,rank,nth,how", DELAYED)
def test_a_collective_is_too_late(tmp_path, world, rank, nth, how):
    """Longer than the deadline: the rank that is late is named, with its step and action, also where all others wait in a chain."""
    e = Engine(tmp_path, PROGRAM, "delay", str(rank), "collective", str(nth), "600000")
    before = held(e.process.pid)
    e.train(devices=f"cpu:{world}", gradient_accumulation_steps=4 // world, deadline_ms=1500, **how)
    e.until("start")
    pids = children(e.process.pid)
    end = e.until(*ENDS)
    step, action = (tmp_path / "delayed").read_text().split()
    assert end["ev"] == "error" and end["rank"] == rank and end["step"] == int(step), (end, step, action)
    assert end["action"].split()[0] == action and f"of step {step}" in end["action"] and "deadline_ms" in end["text"], (end, action)
    leaves_nothing(e, before, pids)


def test_host_memory_that_cannot_be_pinned_is_said(tmp_path, whole):
    """Once, by the first rank; the run goes on to the same bits."""
    e = Engine(tmp_path, PROGRAM, "unpinned", "0", "pin", "0")
    e.train(max_steps=8, devices="cpu:2", gradient_accumulation_steps=2, fsdp=True, fsdp_config={"cpu_offload": True})
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    said = [s["text"] for s in e.events if s["ev"] == "log" and s["level"] == "warning"]
    assert len(said) == 1 and "host memory arrive more slowly: made to fail" in said[0], said
    assert re.search(r" [1-9]\d{5,} bytes .*`ulimit -l unlimited`.*less offloaded.*--host_memory", said[0]), said
    assert e.losses() == whole
    e.close()


def test_a_model_file_is_cut_short_in_use(tmp_path):
    """Reading what a mapped file lacks is SIGBUS: the error names the file."""
    model = tmp_path / "tiny"
    shutil.copytree(TINY, model)
    e = Engine(tmp_path)
    e.train(model=str(model), fsdp=True)
    e.until("step", when=lambda s: s["step"] == 2)
    clock = Clock()
    os.truncate(model / "model.safetensors", 4096)
    end = e.until(*ENDS)
    assert end["ev"] == "error" and clock.seconds() < 6, end
    assert "signal 7" in end["text"] and "model.safetensors was cut short" in end["text"] and end["step"] >= 2, end
    e.works()  # of a whole model
    e.close()


def writes(e, **fields):
    job = {"model": str(TINY), "devices": "cpu:2", "max_length": 128, "fsdp": True}
    e.send("generate", job=job, adapter=None, prompts=["The"], max_new_tokens=2, **fields)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]


@pytest.mark.parametrize("how", ["kill", "stall"])
def test_the_last_files_are_not_written(tmp_path, how):
    """The other rank has ended its work by then: its word is not the run's."""
    e = Engine(tmp_path, PROGRAM, "stall", "0", "saving", "1")
    before = held(e.process.pid)
    e.train(max_steps=2, save_strategy="no", deadline_ms=200 if how == "stall" else 60000)
    e.until("step", when=lambda s: s["step"] == 2)
    pids = e.ranks()
    if how == "kill":
        time.sleep(1)  # the other one is done
        os.kill(pids[0], signal.SIGKILL)
    end = e.until(*ENDS)
    assert end["ev"] == "error" and end["rank"] == 0 and "saving" in end["action"], end
    assert ("signal 9" if how == "kill" else "deadline_ms") in end["text"], end
    leaves_nothing(e, before, pids, works=writes)


def test_a_rank_dies_when_its_work_is_done(tmp_path):
    """While the other one still saves: whatever that comes to, the next command has whole ranks."""
    e = Engine(tmp_path, PROGRAM, "delay", "0", "saving", "1", "2000")
    before = held(e.process.pid)
    e.train(max_steps=2, save_strategy="no")
    e.until("step", when=lambda s: s["step"] == 2)
    pids = e.ranks()
    time.sleep(1)
    os.kill(pids[1], signal.SIGKILL)
    e.until(*ENDS)
    leaves_nothing(e, before, pids)


def test_a_rank_dies_between_commands(tmp_path):
    """The next command comes before the engine has looked."""
    e = Engine(tmp_path)
    before = held(e.process.pid)
    e.train(max_steps=2)
    assert e.until(*ENDS)["ev"] == "done"
    pids = e.ranks()
    os.kill(pids[1], signal.SIGKILL)
    while alive(pids[1]) or len(os.listdir(f"/proc/{pids[1]}/task")) > 1:  # all its threads
        time.sleep(0.01)
    e.train(run="runs/b", max_steps=2)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    leaves_nothing(e, before, pids)


def test_a_rank_takes_a_long_command_late(tmp_path):
    """More than its socket holds, while it does not read."""
    e = Engine(tmp_path)
    writes(e)
    pid, _ = e.ranks()
    os.kill(pid, signal.SIGSTOP)
    later = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    later.start()
    writes(e, ignored="x" * (3 << 20))
    later.join()
    e.close()


def test_a_longer_deadline_takes_fresh_ranks(tmp_path):
    """What a rank waits for another is fixed when it starts."""
    e = Engine(tmp_path)
    ranks = []
    for deadline in (1000, 500, 100000, 100000):
        e.train(run=f"runs/{len(ranks)}", max_steps=2, deadline_ms=deadline)
        assert e.until(*ENDS)["ev"] == "done", e.events[-1]
        ranks.append(e.ranks())
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    e.close()


def test_an_engine_without_a_front_end_does_not_spin(tmp_path):
    """It waits for ranks that may still save."""
    e = Engine(tmp_path, PROGRAM, "delay", "1", "B", "3", "600000")
    e.train(deadline_ms=5000, **SHARDED)
    while not (tmp_path / "delayed").exists():
        time.sleep(0.01)
    e.ours.close()

    def seconds():
        return sum(int(x) for x in pathlib.Path(f"/proc/{e.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]) / os.sysconf("SC_CLK_TCK")

    since = seconds()
    time.sleep(3)
    assert seconds() - since < 0.1
    e.process.wait(30)
    assert e.process.returncode == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing befalls: the bits of its losses."""
    e = Engine(tmp_path_factory.mktemp("whole"))
    e.train(max_steps=8, fsdp=True, save_steps=2)
    assert e.until(*ENDS)["ev"] == "done"
    losses = e.losses()
    e.close()
    return losses


@pytest.mark.parametrize("at", [1, 2, 4, 6, 8, 9, 10, 12, 15, 18])
def test_killed_in_the_middle_of_a_checkpoint(tmp_path, whole, at):
    """Of two ranks that share the optimizer's state; a resume on one rank goes on from the last whole checkpoint to the same bits."""
    e = Engine(tmp_path, PROGRAM, "kill", "0", "saving", str(at))
    e.train(max_steps=8, fsdp=True, save_steps=2)
    end = e.until(*ENDS)
    assert end["ev"] == "error" and end["rank"] == 0 and "saving" in end["action"] and "signal 9" in end["text"], end
    e.close()
    run = tmp_path / "runs" / "a"
    saved = sorted(int(p.name.split("-")[1]) for p in run.glob("checkpoint-*"))
    assert saved == list(range(2, 2 * len(saved) + 1, 2)) and len(saved) < 4
    e = Engine(tmp_path)
    e.train(resume=str(run / f"checkpoint-{saved[-1]}") if saved else None, max_steps=8, devices="cpu:1", gradient_accumulation_steps=4, save_steps=2)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    got = e.losses()
    assert got == {k: v for k, v in whole.items() if k > (saved[-1] if saved else 0)}
    assert not list(run.glob(".checkpoint-*.tmp"))
    e.close()


def test_stopped_in_an_evaluation(tmp_path):
    """The evaluation that a stop cut off is made up for: the records, and what is the best, are those of a run without the stop."""
    settings = dict(max_steps=6, fsdp=True, eval_dataset=str(ROOT / "notebooks/tiny/eval.jsonl"), eval_strategy="steps", eval_steps=2, save_steps=2,
                    load_best_model_at_end=True)

    def records(run):
        state = json.loads((run / "trainer_state.json").read_text())
        return [(r["step"], r["eval_loss"]) for r in state["log_history"] if "eval_loss" in r], state["best_global_step"]

    e = Engine(tmp_path, PROGRAM, "stop", "0", "evaluation", "2")
    e.train(run="runs/cut", **settings)
    end = e.until(*ENDS)
    assert end["ev"] == "stopped" and end["step"] == 4, end
    e.close()
    cut = json.loads((tmp_path / "runs/cut/checkpoint-4/trainer_state.json").read_text())
    assert [r["step"] for r in cut["log_history"] if "eval_loss" in r] == [2]
    e = Engine(tmp_path)
    e.train(run="runs/cut", resume=end["checkpoint"], **settings)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    e.train(run="runs/whole", **settings)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    assert [r[0] for r in records(tmp_path / "runs/whole")[0]] == [2, 4, 6]
    assert records(tmp_path / "runs/cut") == records(tmp_path / "runs/whole")
    e.close()


def test_the_best_is_the_last(tmp_path):
    """Which the first rank still writes when the other is through: both end with it, and the run holds its bits."""
    e = Engine(tmp_path)
    e.train(max_steps=2, fsdp=True, eval_dataset=str(ROOT / "notebooks/tiny/eval.jsonl"), eval_strategy="steps", eval_steps=1, save_steps=1,
            load_best_model_at_end=True)
    assert e.until(*ENDS)["ev"] == "done", e.events[-1]
    run = tmp_path / "runs/a"
    assert json.loads((run / "trainer_state.json").read_text())["best_global_step"] == 2
    assert (run / "adapter_model.safetensors").read_bytes() == (run / "checkpoint-2/adapter_model.safetensors").read_bytes()
    assert not [x for x in e.events if x["ev"] == "log" and "best" in x["text"]]
    e.close()
