"""Tuning: candidates of every site are measured on a GPU, and the fastest is frozen in the Plan. docs/tuning.md

options.py    what was asked, and what the tuned build gives back
questions.py  a built module -> the distinct sites and the candidates worth a measurement
chain.py      a candidate -> launches on weights that are not in the cache, as records
inputs.py     ordinary numbers for the operands
child.py      the process that measures, and may die of it
worker.py     starts that process, asks it, kills it, starts it again
search.py     asks for every candidate, decides, keeps a log
"""
