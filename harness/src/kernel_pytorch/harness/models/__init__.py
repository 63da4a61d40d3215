"""Whole models: stock, compiled, with other libraries, and with the techniques of this project.

`zoo.py` builds the models, `works.py` defines what they do, `variants.py` how each is run, `run.py` times the variants
of a model in turns, `losses.py` compares what they learn, `host.py` times single calls, `record.py` stores the results,
`page.py` prints them.
"""
