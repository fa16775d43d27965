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
    Link("pcie4-x16", 16 * GB * 16 * 128 / 130 / 8, _PCIE),
    Link("pcie5-x16", 32 * GB * 16 * 128 / 130 / 8, _PCIE),
    Link("ethernet-10g", 10 * GB / 8, _ETHERNET),
    Link("ethernet-100g", 100 * GB / 8, _ETHERNET),
    Link("infiniband-edr", 100 * GB / 8, _IB),
    Link("infiniband-hdr", 200 * GB / 8, _IB),
    Link("infiniband-ndr", 400 * GB / 8, _IB),
    Link("infiniband-xdr", 800 * GB / 8, _IB),
)

ACCELERATORS: dict[str, Accelerator] = _by_name(
    # name, FLOP/s, memory, its bandwidth, link, network, source, products measured
    Accelerator("v100", 125 * TERA, 32 * GB, 0.90 * TERA, LINKS["nvlink2"],
                LINKS["infiniband-edr"], _THIRD_PARTY + "; fp16 only", confirmed=False),
    Accelerator("a100-40gb", 312 * TERA, 40 * GB, 1.555 * TERA, LINKS["nvlink3"],
                LINKS["infiniband-hdr"], _THIRD_PARTY, 271 * TERA, confirmed=False),
    Accelerator("a100-80gb", 312 * TERA, 80 * GB, 2.039 * TERA, LINKS["nvlink3"],
                LINKS["infiniband-hdr"],
                _MLENG + "; memory bandwidth also given as 2.00 TB/s", 271 * TERA),
    Accelerator("h100", 989.4 * TERA, 80 * GB, 3.35 * TERA, LINKS["nvlink4"],
                LINKS["infiniband-ndr"], _MLENG, 794.5 * TERA),
    Accelerator("h200", 989 * TERA, 141 * GB, 4.8 * TERA, LINKS["nvlink4"],
                LINKS["infiniband-ndr"], _MLENG, 794.5 * TERA),
    Accelerator("b200", 2250 * TERA, 180 * GB, 8.0 * TERA, LINKS["nvlink5"],
                LINKS["infiniband-ndr"],
                _MLENG + "; 192 GB physical, adapters of 50 to 100 GB/s", 1745 * TERA),
    Accelerator("mi300x", 1307.4 * TERA, 192 * GB, 5.3 * TERA, LINKS["xgmi-mi300x"],
                LINKS["infiniband-ndr"], _MLENG, 668 * TERA),
    Accelerator("tpu-v5p", 459 * TERA, 95 * GB, 2.765 * TERA, LINKS["ici-v5p"],
                None, _TPU),
)  # fmt: skip
