"""The alpha-beta model of the page on communication math, fitted and measured."""

from xtrain.plan import collective_cost, collective_time

from ... import values
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...values import value

MICRO = 1e-6
RANKS = 8
A100_TIMES = {  # nccl-tests' all_reduce_perf on 8 A100: bytes, microseconds
    32_768: 43.83, 131_072: 51.76, 524_288: 80.40, 1_048_576: 101.9,
    4_194_304: 101.5, 8_388_608: 133.5, 33_554_432: 424.0, 134_217_728: 1327.6,
    536_870_912: 4218.4, 2_147_483_648: 16_240.0, 17_179_869_184: 127_997.0,
}  # fmt: skip
ALGORITHMS = {
    "ring": "ring_all_reduce",
    "halving-doubling": "halving_doubling_all_reduce",
    "tree": "tree_all_reduce",
    "recursive doubling": "recursive_doubling_all_reduce",
}


def fitted() -> tuple[float, float]:
    """Alpha from the smallest measured tensor, beta from the largest, as a ring's."""
    small, large = min(A100_TIMES), max(A100_TIMES)
    ring = collective_cost("ring_all_reduce", RANKS)
    beta = A100_TIMES[large] * MICRO / large / float(ring.volume)
    return A100_TIMES[small] * MICRO / ring.messages, beta


@value
def comm_fitted_alpha() -> float:
    """Seconds a message, of the smallest measured tensor."""
    return fitted()[0]


@value
def comm_fitted_bandwidth() -> float:
    """Bytes a second, of the largest."""
    return 1 / fitted()[1]


@FIGURES
def alpha_beta_measured() -> str:
    """Four algorithms by the model, and what eight A100 took."""
    alpha, beta = fitted()
    sizes = [2.0**power for power in range(15, 35)]
    lines = {
        name: [
            (size, collective_time(algorithm, size, RANKS, alpha, beta))
            for size in sizes
        ]
        for name, algorithm in ALGORITHMS.items()
    }
    lines["measured"] = [(size, us * MICRO) for size, us in A100_TIMES.items()]
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(15, 35, 5)]),
        Axis("time", "log", values.seconds),
        f"Time of an all-reduce among {RANKS} ranks",
        "The model's line of a ring goes through the first and the last measurement.",
    )


@value
def comm_model_error(size: int) -> float:
    """The model's time of a measured size over the measured one."""
    time = collective_time("ring_all_reduce", size, RANKS, *fitted())
    return time / (A100_TIMES[size] * MICRO)
