"""Accelerators and links: compute, memory and bandwidth.

Rates are plain numbers in base units: FLOP/s (a multiply-add is two), bytes, and
bytes per second in ONE direction. Vendors print NVLink both ways at once ("900
GB/s" for H100); the number that a ring can use is half of that (450 GB/s). Memory
sizes are the vendor's (1 GB = 1e9 bytes); a driver may report more, so ask it where
you can.

Every preset names the source of its figures. `confirmed=False` marks the ones that
came from a third-party table and were not compared with the vendor's datasheet.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from xtrain.plan.checks import require_one_of

GB = 1e9
TERA = 1e12

_MLENG = "Stas Bekman, Machine Learning Engineering, hardware tables"
_TPU = "Google Cloud TPU documentation; How to Scale Your Model (JAX scaling book)"
_THIRD_PARTY = "third-party tables, vendor datasheet not read"
_PCIE = "PCI Express transfer rate x lanes x 128/130 / 8 bits"
_ETHERNET = "Ethernet bit rate / 8 bits"
_IB = "InfiniBand 4x signalling rate / 8 bits"


@dataclass(frozen=True, slots=True)
class Link:
    """A wire between two devices: payload bytes per second in one direction."""

    name: str
    bandwidth: float
    source: str

    @property
    def beta(self) -> float:
        """Seconds per byte, the beta of the alpha-beta model."""
        return 1.0 / self.bandwidth

    @property
    def duplex(self) -> float:
        """Both directions added, the number that vendors print for NVLink."""
        return 2.0 * self.bandwidth

    @staticmethod
    def preset(name: str) -> "Link":
        """The link called `name` in `LINKS`; ValueError lists the known names."""
        return _look_up(LINKS, name, "link")


@dataclass(frozen=True, slots=True)
class Host:
    """What a device has of its server: bytes a second, in one direction."""

    link: float
    """To the device."""
    memory: float
    """A device's part of the memory bandwidth."""
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: dense 16-bit peak, memory, and its two links.

    `flops` is the dense bf16 (V100: fp16) peak in FLOP/s, without sparsity.
    `matmul` is the best matrix-multiply rate that was measured, None where no
    figure is known. `link` joins devices of one node, `network` (one adapter per
    device, the usual reference design and not a property of the part) joins nodes.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: Link
    network: Link | None
    source: str
    matmul: float | None = None
    confirmed: bool = True
    node: int = 8
    """Devices that `link` joins: a server, a rack of 72, or a torus of TPUs."""
    host: int = 8
    """Devices of one operating system."""
    links: int = 1
    """Links that a collective over all devices of a node uses at the same time."""
    fp8: float = 1.0
    """The dense fp8 peak over `flops`; 1 where the device has none."""
    fp4: float = 1.0
    exponentials: float | None = None
    """Exponentials a second: units x 16 a clock; None where no figure is known."""
    server: Host | None = None
    """Where the optimizer's state goes with offload; None where it is not modelled."""

    def peak(self, precision: str) -> float:
        """FLOP/s of products in that precision; ValueError if it has none."""
        times = {"bf16": 1.0, "fp16": 1.0, "fp8": self.fp8, "fp4": self.fp4}
        require_one_of("precision", precision, times)
        if times[precision] == 1 and precision in ("fp8", "fp4"):
            raise ValueError(f"{self.name} has no {precision} products: use bf16")
        return self.flops * times[precision]

    @property
    def matmul_efficiency(self) -> float | None:
        """Measured matrix-multiply rate over the printed peak."""
        return None if self.matmul is None else self.matmul / self.flops

    @staticmethod
    def preset(name: str) -> "Accelerator":
        """The device called `name` in `ACCELERATORS`; ValueError lists names."""
        return _look_up(ACCELERATORS, name, "accelerator")


Preset = TypeVar("Preset", Link, Accelerator)


def peak_flops(clock_hz: float, fma_per_clock: int, units: int) -> float:
    """FLOP/s of `units` tensor cores that each do `fma_per_clock` multiply-adds."""
    return clock_hz * fma_per_clock * units * 2


def _look_up(table: dict[str, Preset], name: str, kind: str) -> Preset:
    try:
        return table[name.lower()]
    except KeyError:
        asked = name.lower()[:40]
        near = [k for k in table if asked.startswith(k) or k.startswith(asked)]
        near = near or get_close_matches(asked, table)
        known = f"known: {', '.join(sorted(table))}"
        known = known if len(known) <= 120 else known[:117] + "..."
        if near:  # the whole list is longer than a message should be
            known = f"did you mean {', '.join(near)}?"
        raise ValueError(f"unknown {kind} {asked!r}; {known}") from None


def _by_name(*presets: Preset) -> dict[str, Preset]:
    return {preset.name: preset for preset in presets}


LINKS: dict[str, Link] = _by_name(
    Link("nvlink2", 150 * GB, _MLENG),
    Link("nvlink3", 300 * GB, _MLENG),
    Link("nvlink4", 450 * GB, _MLENG),
    Link("nvlink5", 900 * GB, _MLENG),
    Link("xgmi-mi300x", 448 * GB, _MLENG + "; 7 links of 64 GB/s, 64 to one peer"),
    Link("xgmi-mi300x-peer", 64 * GB, _MLENG),
    Link("ici-v5p", 90 * GB, _TPU + "; one of 6 links (90 or 100)"),
    Link("ici-v4", 45 * GB, _TPU + "; one of 6 links"),
    Link("ici-v5e", 45 * GB, _TPU + "; one of 4 links"),
    Link("ici-v6e", 90 * GB, _TPU + "; one of 4 links"),
    Link("ici-v7x", 100 * GB, _TPU + "; one of 6 links"),
    Link("pcie4-x16", 16 * GB * 16 * 128 / 130 / 8, _PCIE),
    Link("pcie5-x16", 32 * GB * 16 * 128 / 130 / 8, _PCIE),
    Link("ethernet-10g", 10 * GB / 8, _ETHERNET),
    Link("ethernet-100g", 100 * GB / 8, _ETHERNET),
    Link("infiniband-edr", 100 * GB / 8, _IB),
    Link("infiniband-hdr", 200 * GB / 8, _IB),
    Link("infiniband-ndr", 400 * GB / 8, _IB),
    Link("infiniband-xdr", 800 * GB / 8, _IB),
)


def _special(units: int, clock: float, per_clock: int = 16) -> float:
    """Exponentials a second."""
    return units * clock * per_clock


def _server(lanes: float, channels: float, source: str) -> Host:
    """PCIe 16x of so many GT/s a lane; GB/s of all memory, of eight devices."""
    return Host(lanes * GB * 16 * 128 / 130 / 8, channels * GB / 8, source)


_DGX_1 = _server(8, 2 * 76.8, "DGX-1: PCIe 3, two Xeon E5-2698 v4")
_DGX_A100 = _server(16, 2 * 204.8, "DGX A100: PCIe 4, two EPYC 7742")
_DGX_H100 = _server(32, 2 * 307.2, "DGX H100: PCIe 5, two Xeon 8480C")
_DGX_B200 = _server(32, 2 * 358.4, "DGX B200: PCIe 5, two Xeon 8570")
_EPYC = _server(32, 2 * 460.8, "eight MI300X: PCIe 5, two EPYC 9654")
_GRACE = Host(225 * GB, 256 * GB, "GB200: half of a Grace's NVLink-C2C and LPDDR5X")
_BLACKWELL = "NVIDIA Blackwell and Blackwell Ultra datasheets, dense rates of one GPU"

ACCELERATORS: dict[str, Accelerator] = _by_name(
    # name, FLOP/s, memory, its bandwidth, link, network, source, products measured
    Accelerator("v100", 125 * TERA, 32 * GB, 0.90 * TERA, LINKS["nvlink2"],
                LINKS["infiniband-edr"], _THIRD_PARTY + "; fp16 only", confirmed=False,
                exponentials=_special(80, 1.53e9),
                server=_DGX_1),
    Accelerator("a100-40gb", 312 * TERA, 40 * GB, 1.555 * TERA, LINKS["nvlink3"],
                LINKS["infiniband-hdr"], _THIRD_PARTY, 271 * TERA, confirmed=False,
                exponentials=_special(108, 1.41e9),
                server=_DGX_A100),
    Accelerator("a100-80gb", 312 * TERA, 80 * GB, 2.039 * TERA, LINKS["nvlink3"],
                LINKS["infiniband-hdr"],
                _MLENG + "; memory bandwidth also given as 2.00 TB/s", 271 * TERA,
                exponentials=_special(108, 1.41e9),
                server=_DGX_A100),
    Accelerator("h100", 989.4 * TERA, 80 * GB, 3.35 * TERA, LINKS["nvlink4"],
                LINKS["infiniband-ndr"], _MLENG, 794.5 * TERA,
                fp8=2.0, exponentials=_special(132, 1.83e9),
                server=_DGX_H100),
    Accelerator("h100-96gb", 989.4 * TERA, 96 * GB, 2.4 * TERA, LINKS["nvlink4"],
                LINKS["infiniband-ndr"],
                "torchtitan benchmarks, December 2024: HBM2e, power limit 500 W",
                794.5 * TERA, fp8=2.0, exponentials=_special(132, 1.83e9),
                server=_DGX_H100),
    Accelerator("h200", 989 * TERA, 141 * GB, 4.8 * TERA, LINKS["nvlink4"],
                LINKS["infiniband-ndr"], _MLENG, 794.5 * TERA,
                fp8=2.0, exponentials=_special(132, 1.83e9),
                server=_DGX_H100),
    Accelerator("b200", 2250 * TERA, 180 * GB, 8.0 * TERA, LINKS["nvlink5"],
                LINKS["infiniband-ndr"],
                _MLENG + "; 192 GB physical, adapters of 50 to 100 GB/s", 1745 * TERA,
                fp8=2.0, fp4=4.0, exponentials=_special(148, 1.85e9),
                server=_DGX_B200),
    Accelerator("gb200", 2500 * TERA, 186 * GB, 8.0 * TERA, LINKS["nvlink5"],
                LINKS["infiniband-ndr"], _BLACKWELL, fp4=4.0,
                exponentials=_special(152, 2.0e9), fp8=2.0, node=72, host=4,
                server=_GRACE),
    Accelerator("b300", 2250 * TERA, 270 * GB, 8.0 * TERA, LINKS["nvlink5"],
                LINKS["infiniband-xdr"], _BLACKWELL + "; 288 GB physical",
                fp8=2.0, fp4=6.0, exponentials=_special(148, 1.85e9, 32),
                server=_DGX_B200),
    Accelerator("gb300", 2500 * TERA, 279 * GB, 8.0 * TERA, LINKS["nvlink5"],
                LINKS["infiniband-xdr"], _BLACKWELL + "; 288 GB physical", fp4=6.0,
                exponentials=_special(152, 2.0e9, 32), fp8=2.0, node=72, host=4,
                server=_GRACE),
    Accelerator("mi300x", 1307.4 * TERA, 192 * GB, 5.3 * TERA, LINKS["xgmi-mi300x"],
                LINKS["infiniband-ndr"], _MLENG, 668 * TERA,
                fp8=2.0, exponentials=_special(304, 2.1e9),
                server=_EPYC),
    Accelerator("mi325x", 1307.4 * TERA, 256 * GB, 6.0 * TERA, LINKS["xgmi-mi300x"],
                LINKS["infiniband-ndr"], _MLENG, 784.9 * TERA,
                fp8=2.0, exponentials=_special(304, 2.1e9),
                server=_EPYC),
    Accelerator("tpu-v4", 275 * TERA, 32 * GB, 1.228 * TERA, LINKS["ici-v4"],
                None, _TPU, node=4096, host=4, links=6),
    Accelerator("tpu-v5e", 197 * TERA, 16 * GB, 0.82 * TERA, LINKS["ici-v5e"],
                LINKS["ethernet-100g"], _TPU, node=256, links=4),
    Accelerator("tpu-v5p", 459 * TERA, 95 * GB, 2.765 * TERA, LINKS["ici-v5p"],
                None, _TPU, node=8960, host=4, links=6),
    Accelerator("tpu-v6e", 918 * TERA, 32 * GB, 1.64 * TERA, LINKS["ici-v6e"],
                LINKS["ethernet-100g"], _TPU, node=256, links=4),
    Accelerator("tpu-v7x", 2307 * TERA, 192 * GB, 7.37 * TERA, LINKS["ici-v7x"],
                None, _TPU, node=9216, host=4, links=6, fp8=2.0),
)  # fmt: skip
