"""What ran, on which code, with what outcome: one store for all evidence.

`closure` digests the code that a run reaches; `store` keeps what the run gave under
that digest; `recorder` feeds it with the outcomes of tests.
"""
