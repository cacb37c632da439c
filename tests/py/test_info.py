"""`info`: how GPUs are joined, by a driver library that is built here, and what is missing."""
import json
import os
import re
import subprocess

import pytest
from front_end import BUILD, ROOT


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """A folder with a CUDA backend of the null device and libnvidia-ml.so.1; old/ has one that lacks most functions."""
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "old").mkdir()
    cc = os.environ.get("CC", "gcc").split() + ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{ROOT}"]
    for source, out, flags in (("cuda.c", "libqlora-fake.so", []), ("nvml.c", "libnvidia-ml.so.1", []), ("nvml.c", "old/libnvidia-ml.so.1", ["-DOLD"])):
        subprocess.run([*cc, *flags, str(ROOT / "tests/py/fakes" / source), "-o", str(folder / out)], check=True)
    return folder


def environment(fakes, gpus, nvml, **more):
    where = fakes / "old" if nvml == "old" else fakes
    return dict(os.environ, QLORA_CUDA_LIBRARY=str(fakes / "libqlora-fake.so"), FAKE_GPUS=str(gpus), FAKE_NVML=nvml,
                LD_LIBRARY_PATH=str(where) if nvml else "", **more)


def devices(fakes, gpus, nvml, **more):
    r = subprocess.run([str(BUILD / "qlora-engine"), "--devices"], env=environment(fakes, gpus, nvml, **more), capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    found = json.loads(r.stdout)
    assert [d["backend"] for d in found["devices"]] == ["cuda"] * gpus + ["cpu"] and not found["missing"], found
    return found["devices"]


def info(fakes, gpus, nvml, **more):
    env = environment(fakes, gpus, nvml, QLORA_BUNDLED=str(ROOT / "notebooks"), **more)
    r = subprocess.run([str(BUILD / "qlora")], input="info\n", env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert max(len(line) for line in r.stdout.splitlines() if str(BUILD) not in line) <= 80, r.stdout
    return r.stdout


def test_two_t4(fakes):
    d = devices(fakes, 2, "t4")
    assert d[0]["pcie"] == {"generation": 1, "width": 16, "max_generation": 3, "max_width": 16}
    assert d[0]["links"] == [{"to": 1, "path": "the host bridge", "nvlinks": 0, "nvlink_gbs": 0, "p2p": False, "why": "the chipset does not support it"}]
    assert d[1]["links"] == [] and "links" not in d[2]
    text = info(fakes, 2, "t4")
    assert "3.0 x16 " in text and "3.0 x8 of x16" in text and "sm_75" in text
    assert "0–1      PCIe through the host bridge  no: the chipset does not support it" in text
    assert "driver 560.35.03 · CUDA 12.8 · cuBLAS 12.8.4 · NCCL 2.25.1" in text and "!" not in text


def test_a_switch_joins_all(fakes):
    d = devices(fakes, 8, "switch", FAKE_PEERS="all")
    assert [len(x["links"]) for x in d[:8]] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert all(k["nvlinks"] == 18 and k["p2p"] and k["why"] == "" for x in d[:8] for k in x["links"])
    assert "all 28 pairs  NVLink × 18, 478 GB/s each way  yes" in info(fakes, 8, "switch", FAKE_PEERS="all")


def test_pairs_are_grouped_by_how_they_are_joined(fakes):
    text = info(fakes, 4, "pairs", FAKE_PEERS="all")
    assert "0–1, 2–3            NVLink × 4, 106 GB/s each way  yes" in text
    assert "0–2, 0–3, 1–2, 1–3  PCIe through two sockets" in text


@pytest.mark.parametrize("nvml", ["", "old", "broken"])
def test_without_nvml_what_cuda_says_is_left(fakes, nvml):
    d = devices(fakes, 2, nvml, FAKE_PEERS="all")
    assert d[0]["links"] == [{"to": 1, "path": "", "nvlinks": 0, "nvlink_gbs": 0, "p2p": True, "why": ""}]
    assert "0–1      PCIe       yes" in info(fakes, 2, nvml, FAKE_PEERS="all")


def test_what_is_missing_is_named_with_what_to_do(fakes):
    text = info(fakes, 2, "t4", FAKE_NO_NCCL="1")
    assert "! NCCL is missing, so only one GPU can be used: install libnccl2, or pip's" in text
    assert "NCCL is missing" not in info(fakes, 1, "t4", FAKE_NO_NCCL="1")
    env = dict(os.environ, QLORA_CUDA_LIBRARY="/nowhere/libqlora-cuda.so", QLORA_BUNDLED=str(ROOT / "notebooks"))
    text = subprocess.run([str(BUILD / "qlora")], input="info\n", env=env, capture_output=True, text=True).stdout
    assert "! No GPU:" in text and "/nowhere/libqlora-cuda.so" in text and "runs on the CPU" in text.replace("\n ", "")


def test_the_processor_is_a_device_of_the_same_name(fakes):
    """Without the marks of makers, which made it too long for a line of the training view."""
    name = devices(fakes, 1, "t4")[-1]["name"]
    assert name and "(R)" not in name and "(TM)" not in name
    assert re.search(f"\\nprocessor +{re.escape(name)}, ", info(fakes, 1, "t4"))
