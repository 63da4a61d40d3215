"""Whole models as they are used: stock, compiled, with other libraries, and with the techniques of this project.

`zoo.py` builds the models, `works.py` says what is done with them, `variants.py` how each is run, `run.py` times the
variants of a model in turns, `losses.py` compares what they learn, `record.py` keeps what was found, `tables.py` prints
it.
"""
