"""The properties that a CPU and a GPU report."""

import types

import pytest
import torch

from companion import hardware


def test_describe_cpu_on_this_machine():
    found = hardware.describe_cpu()
    assert found["name"]
    assert 1 <= found["usable_cores"] <= found["logical_cores"]
    assert found["memory_bytes"] > 2**28
    assert None not in found.values()


def test_read_cpu_caches_skips_instructions_and_counts_sharing(tmp_path):
    entries = [
        ("1", "Data", "32K", "0"),
        ("1", "Instruction", "64K", "0"),
        ("2", "Unified", "1024K", "0-1"),
        ("3", "Unified", "32M", "0-7,16-23"),
    ]
    for number, (level, kind, size, shared) in enumerate(entries):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in zip(
            ("level", "type", "size", "shared_cpu_list"), (level, kind, size, shared), strict=True
        ):
            (folder / name).write_text(text + "\n", encoding="utf-8")
    assert hardware.read_cpu_caches(tmp_path) == {
        "l1_cache_bytes": 2**15,
        "l2_cache_bytes": 2**20,
        "l3_cache_bytes": 2**25,
        "l3_sharing_cores": 16,
    }
    assert hardware.read_cpu_caches(tmp_path / "none") == {}


def test_parse_size_refuses_other_text():
    with pytest.raises(ValueError, match="expected a size such as 32K"):
        hardware.parse_size("large")


def test_parse_nvidia_smi_leaves_out_what_is_not_known():
    found = hardware.parse_nvidia_smi("1980, 3201, 5, 16, [N/A]\n")
    assert found == {
        "clock_hz": 1.98e9,
        "memory_clock_hz": 3.201e9,
        "pcie_generation": 5.0,
        "pcie_lanes": 16.0,
    }
    assert hardware.parse_nvidia_smi("") == {}


def test_describe_gpu_reads_what_torch_has(monkeypatch):
    properties = types.SimpleNamespace(
        name="NVIDIA X",
        multi_processor_count=132,
        warp_size=32,
        total_memory=2**37,
        major=9,
        minor=0,
        regs_per_multiprocessor=65536,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(hardware, "read_nvidia_smi", lambda _: {"clock_hz": 1.98e9})
    found = hardware.describe_gpu()
    assert found["sms"] == 132
    assert found["registers_per_sm"] == 65536
    assert found["compute_capability"] == "9.0"
    assert found["clock_hz"] == 1.98e9
    assert "l2_cache_bytes" not in found  # this torch does not report it
