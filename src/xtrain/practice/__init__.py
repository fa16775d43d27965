"""Drills: write an algorithm from a blank file, and have its messages checked, too.

drills()                    every drill, with its minutes and difficulty
task(name, level)           the file to begin with
check(name, source)         runs it on ranks; what is wrong, in words
"""

from xtrain.practice.checking import check
from xtrain.practice.drills import Drill, drill, drills
from xtrain.practice.tasks import LEVELS, task
from xtrain.practice.verdicts import Verdict

__all__ = ["LEVELS", "Drill", "Verdict", "check", "drill", "drills", "task"]
