"""The spine of all lectures: one tiny model, one seed, one loss curve of one process.

training.py    the model, its batches and its training loop (imports torch)
reference.py   the curve of one process, kept in docs/data/spine/reference.json
wrappers.py    the run under the wrappers and layouts of each lecture: LAYOUTS
compare.py     curves of wrappers beside that of one process: a figure and a table
"""
