# python snippets/lc5/actions.py
from xtrain.schedules import dualpipe, parse_action

for text in ("2F0", "2B0", "2W0", "2BW0", "2F4&5B1", "3RECV_F0", "2REDUCE"):
    action = parse_action(text)
    parts = [(part.kind, part.stage, part.micro_batch) for part in action.parts]
    assert str(action) == text
    print(f"{text:9} {parts}")

schedule = dualpipe(2, 4)
print(schedule)
print("rank of stage 0:", [schedule.rank_of(0, i) for i in range(4)])
