"""The alpha-beta model of the page on communication math, fitted and measured."""

from xtrain.plan import collective_cost, collective_time

from ... import values
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, value

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


COLLECTIVES = (
    ("broadcast, tree", "what all end with", r"$\lceil\log_2 N\rceil M$",
     r"$\lceil\log_2 N\rceil$", "broadcast"),
    ("all-gather, ring", "what all end with", r"$\frac{N-1}{N} M$", "$N-1$",
     "ring_all_gather"),
    ("reduce-scatter, ring", "what each starts with", r"$\frac{N-1}{N} M$", "$N-1$",
     "ring_reduce_scatter"),
    ("all-to-all", "what each starts with", r"$\frac{N-1}{N} M$", "$N-1$",
     "all_to_all"),
    ("all-reduce, ring", "what all have", r"$2\frac{N-1}{N} M$", "$2(N-1)$",
     "ring_all_reduce"),
    ("all-reduce, halving-doubling", "what all have", r"$2\frac{N-1}{N} M$",
     r"$2\log_2 N$", "halving_doubling_all_reduce"),
    ("all-reduce, recursive doubling", "what all have", r"$M \log_2 N$",
     r"$\log_2 N$", "recursive_doubling_all_reduce"),
    ("all-reduce, tree", "what all have", r"$2 M \lceil\log_2 N\rceil$",
     r"$2\lceil\log_2 N\rceil$", "tree_all_reduce"),
    ("all-reduce, two pipelined trees", "what all have", "$2M$",
     r"$2\lceil\log_2 N\rceil$", "double_tree_all_reduce"),
    ("all-reduce, all to everybody", "what all have", "$(N-1) M$", "$N-1$",
     "one_shot_all_reduce"),
)  # fmt: skip


@TABLES
def comm_collectives(ranks: int = 8) -> Table:
    """Closed forms of bytes and messages one after another, and their values."""
    rows = []
    for name, size, volume, messages, algorithm in COLLECTIVES:
        cost = collective_cost(algorithm, ranks)
        rows.append(
            [name, size, volume, f"{number(float(cost.volume))} M", messages,
             str(cost.messages)]
        )  # fmt: skip
    header = ["collective", "M is the size of", "bytes", f"N = {ranks}", "messages",
              f"N = {ranks}"]  # fmt: skip
    return Table(header, rows, "lllrlr")


@value
def comm_model_error(size: int) -> float:
    """The model's time of a measured size over the measured one."""
    time = collective_time("ring_all_reduce", size, RANKS, *fitted())
    return time / (A100_TIMES[size] * MICRO)
