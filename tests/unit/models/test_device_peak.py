"""The peak rates of GPUs by their names."""

import pytest

from rlpack.models.device_peak import listed_peak


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", 70.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_name_has_the_rate_of_its_data_sheet(name: str, bf16: float):
    rate = listed_peak(name, "bf16")
    assert rate == pytest.approx(bf16 * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA RTX A4000", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-SXM2-16GB"),
    ],
)
def test_a_name_that_only_contains_a_listed_one_is_measured(name: str):
    assert listed_peak(name, "bf16") is None
