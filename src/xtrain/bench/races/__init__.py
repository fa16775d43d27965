"""One file of races for each lecture: a `TITLE` and a list `RACES`."""
