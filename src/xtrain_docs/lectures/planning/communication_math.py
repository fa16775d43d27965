"""The page on communication math: the alpha-beta model beside measured times."""

from xtrain.plan import collective_cost

from ...values import VALUES, value

A100_TIMES = {  # nccl-tests' all_reduce_perf on 8 A100: bytes, microseconds
    32_768: 43.83, 131_072: 51.76, 524_288: 80.40, 1_048_576: 101.9,
    4_194_304: 101.5, 8_388_608: 133.5, 33_554_432: 424.0, 134_217_728: 1327.6,
    536_870_912: 4218.4, 2_147_483_648: 16_240.0, 17_179_869_184: 127_997.0,
}  # fmt: skip
VALUES["a100_seconds"] = {size: us * 1e-6 for size, us in A100_TIMES.items()}


@value
def a100_alpha_beta() -> tuple[float, float]:
    """Alpha from the smallest measured tensor, beta from the largest, as a ring's."""
    small, large = min(A100_TIMES), max(A100_TIMES)
    ring = collective_cost("ring_all_reduce", 8)
    beta = A100_TIMES[large] * 1e-6 / large / float(ring.volume)
    return A100_TIMES[small] * 1e-6 / ring.messages, beta
