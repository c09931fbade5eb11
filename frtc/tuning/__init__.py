"""Tuning: candidates of every site are measured on a GPU, and the fastest is frozen in the Plan. docs/tuning.md

options.py    what was asked, and what the tuned build gives back
questions.py  a built module -> the distinct sites and the candidates worth a measurement
tuned.py      sites by themselves, then in the whole chain; tactics written, the module built with them

by themselves:
chain.py      a candidate -> launches on weights that are not in the cache, as records
inputs.py     ordinary numbers for the operands
search.py     asks for every candidate, decides, keeps a log

in the whole chain:
trial.py      a whole program on weights that nobody trained, its times and what it computes
builder.py    the process that builds such programs; builders.py starts some of them
whole.py      tries every candidate in its place, decides

child.py      the process that measures, and may die of it; worker.py asks it
process.py    starts a process that answers, asks it, kills it, starts it again
"""
