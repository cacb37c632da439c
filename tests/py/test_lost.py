"""A run whose numbers are lost says so."""
from engine import Engine, job


def test_an_adapter_without_numbers_is_said_once(tmp_path):
    """A zero gradient over a zero second moment, without epsilon: the first update is none."""
    engine = Engine(tmp_path)
    events, end = engine.run("train", job=job(adam_epsilon=0.0, max_steps=4, devices="cpu:2"), run=str(tmp_path / "a"))
    assert end["ev"] == "done" and [e["loss"] is None for e in events if e["ev"] == "step"] == [False, True, True, True]
    said = [e["text"] for e in events if e["ev"] == "log"]
    assert len(said) == 1 and said[0].startswith("step 2: loss nan") and "learning_rate" in said[0], said
    events, end = engine.run("train", job=job(max_steps=2, devices="cpu:2"), run=str(tmp_path / "b"))
    assert end["ev"] == "done" and not [e for e in events if e["ev"] == "log"]
    engine.close()
