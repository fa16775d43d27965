"""The spine of all lectures: one tiny model, one seed, one loss curve of one process.

    training.py    the model, its batches and its training loop (imports torch)
    reference.py   the curve of one process, kept in docs/data/spine/reference.json
    compare.py     curves of a lecture's wrappers beside it: a figure and a table

A lecture adds its wrappers in lectures/lcN/runs_spine.py; lectures/spine/curves.py
lists which of them a page shows.
"""
