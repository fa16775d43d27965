# python snippets/lc5/passes.py
from dataclasses import replace

from xtrain.schedules import one_f_one_b, validate, with_messages, with_reductions

schedule = one_f_one_b(2, 2)
print(with_reductions(with_messages(schedule)))


def explain(actions, **limits):
    try:
        validate(replace(schedule, actions=actions), **limits)
    except ValueError as error:
        print(error)


first, second = schedule.actions
explain((first[:-1], second))  # a backward is missing
explain((first, second[::-1]))  # a backward before its forward
explain((first, second), activations=1)  # too much memory
