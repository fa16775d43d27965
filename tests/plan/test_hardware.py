"""Hardware presets: checked against clock x width, link x links, and each other."""

import subprocess
import sys

import pytest

from xtrain.plan import ACCELERATORS, LINKS, Accelerator, Link, peak_flops

MEGA, GB = 1e6, 1e9


@pytest.mark.verifies(
    "xtrain.plan.hardware:Accelerator", "xtrain.plan.hardware:peak_flops"
)
@pytest.mark.parametrize(
    ("name", "clock", "fma_per_clock", "units", "error"),
    [
        ("h100", 1830 * MEGA, 512, 528, 1e-4),
        ("a100-80gb", 1410 * MEGA, 256, 432, 5e-4),
        ("mi300x", 2100 * MEGA, 256, 1216, 1e-4),
        ("v100", 1530 * MEGA, 64, 640, 3e-3),
    ],
)
def test_peak_is_clock_times_width(name, clock, fma_per_clock, units, error):
    flops = Accelerator.preset(name).flops
    assert peak_flops(clock, fma_per_clock, units) == pytest.approx(flops, rel=error)


@pytest.mark.verifies("xtrain.plan.hardware:Link")
@pytest.mark.parametrize(
    ("name", "duplex"), [("nvlink2", 300), ("nvlink3", 600), ("nvlink4", 900)]
)
def test_vendors_print_both_directions(name, duplex):
    assert Link.preset(name).duplex == duplex * GB


@pytest.mark.verifies("xtrain.plan.hardware:Accelerator", "xtrain.plan.hardware:Link")
def test_mi300x_has_seven_links():
    peer = Link.preset("xgmi-mi300x-peer")
    assert 7 * peer.bandwidth == Accelerator.preset("mi300x").link.bandwidth


@pytest.mark.verifies("xtrain.plan.hardware:Accelerator")
@pytest.mark.parametrize(
    ("name", "share"),
    [("a100-80gb", 0.87), ("h100", 0.80), ("h200", 0.80), ("b200", 0.78),
     ("mi300x", 0.51)],
)  # fmt: skip
def test_measured_matmul_share(name, share):
    efficiency = Accelerator.preset(name).matmul_efficiency
    assert efficiency == pytest.approx(share, abs=0.005)


@pytest.mark.verifies("xtrain.plan.hardware:Link")
def test_pcie_doubles_and_ethernet_is_its_bits():
    fourth, fifth = Link.preset("pcie4-x16"), Link.preset("pcie5-x16")
    assert fourth.bandwidth == pytest.approx(31.5 * GB, rel=1e-3)
    assert fifth.bandwidth == 2 * fourth.bandwidth
    assert 8 * Link.preset("ethernet-100g").bandwidth == 100 * GB
    assert 8 * Link.preset("ethernet-10g").bandwidth == 10 * GB


def test_infiniband_rates_double_each_generation():
    rates = [LINKS[f"infiniband-{g}"].bandwidth for g in ("edr", "hdr", "ndr", "xdr")]
    assert rates == [12.5 * GB, 25 * GB, 50 * GB, 100 * GB]


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_every_preset_names_its_source_and_stays_in_base_units(name):
    part = ACCELERATORS[name]
    assert part.source
    assert part.link.source
    assert 1e14 < part.flops < 1e16
    assert 1e10 < part.memory < 1e12
    assert 1e11 < part.memory_bandwidth < 1e13
    assert 1e10 < part.link.bandwidth < 1e12
    assert part.link.beta == 1 / part.link.bandwidth
    if part.network is not None:
        assert part.network.bandwidth < part.link.bandwidth


@pytest.mark.verifies("xtrain.plan.hardware:Link")
def test_scaling_book_uses_ninety_where_the_vendor_implies_one_hundred():
    from_vendor = 4800e9 / 8 / 6
    assert from_vendor == 100 * GB
    assert Link.preset("ici-v5p").bandwidth == 90 * GB


@pytest.mark.verifies("xtrain.plan.hardware:Accelerator", "xtrain.plan.hardware:Link")
def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown accelerator 'zz9'; known: .*h100"):
        Accelerator.preset("zz9")
    near_names = {
        "h10": "h100, h100-96gb",
        "H100-80GB": "h100",
        "mi30x": "mi300x, mi325x",
        "a100": "a100-40gb, a100-80gb",
    }
    for name, near in near_names.items():
        with pytest.raises(ValueError, match=rf"'; did you mean {near}\?$"):
            Accelerator.preset(name)
    for name in ("nvlink9", "n" * 1000):
        with pytest.raises(ValueError, match="unknown link 'n") as caught:
            Link.preset(name)
        assert len(str(caught.value)) <= 200


def test_plan_runs_on_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import xtrain.plan; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'xtrain'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
