# python snippets/lc5/dualpipe.py
from xtrain.schedules import SCHEDULES, render_text, simulate

print(render_text(simulate(SCHEDULES["dualpipe"](2, 4))))

for name in ("one_f_one_b", "dualpipe_simple", "dualpipe"):
    schedule = SCHEDULES[name](8, 20)
    steps = [simulate(schedule, all_to_all=time).makespan for time in (0, 1, 2)]
    idle = max(simulate(schedule).idle)
    print(f"{name:15} idle {idle:2g}, step with 0, 1, 2 of exchange {steps}")

for sizes in ((3, 8), (4, 9), (4, 6)):
    try:
        SCHEDULES["dualpipe"](*sizes)
    except ValueError as error:
        print(error)
