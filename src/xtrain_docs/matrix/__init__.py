"""The support matrix: what can be combined, found by training it.

    features.py   the features, each some fields of a Setup
    cases.py      which cases there are, and what is declared not to work
    toy.py        the model and its batches
    cut.py        the model, cut over tensor ranks
    wrappers.py   the wrappers, behind one set of names
    training.py   a case on ranks, and its reference in one process

tests/matrix/test_matrix.py runs every case and holds it against what is declared: it
works when the weights after three steps are those of one process. The page's tables
read from the verification record which of these tests have passed.

To add a row, write one more call in features.py:

    feature("every_other", "recompute", "recompute every other block",
            model={"every": 2})

and whatever it needs in Setup, Toy or Run. It is then tried with every wrapper and
together with every other feature, its axis's apart. To add a wrapper, give it a name in
WRAPPERS and a case in `wrappers.wrap`. What does not work makes a test fail, until it
is declared in cases.py: refused, with the words of its error, or wrong.
"""
