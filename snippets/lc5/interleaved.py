# python snippets/lc5/interleaved.py
from xtrain.schedules import interleaved, one_f_one_b, simulate, with_messages


def report(name, schedule):
    part = 1 / schedule.chunks  # a chunk is so much shorter than a rank's whole part
    timeline = simulate(schedule, part, part, part)
    sent = str(with_messages(schedule)).count("SEND")
    print(
        f"{name}: idle {max(timeline.idle):.2f}, step {timeline.makespan:.2f}, "
        f"{timeline.peak_activations[0]:.2f} held by rank 0, {sent} messages"
    )


report("1F1B    ", one_f_one_b(4, 8))
report("2 chunks", interleaved(4, 8, 2))
report("4 chunks", interleaved(4, 8, 4))
report("m = 10  ", interleaved(4, 10, 2))
report("m = 3   ", interleaved(4, 3, 2))
