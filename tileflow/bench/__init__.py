"""``python -m tileflow.bench``: check the results first, then time them.

``options`` reads the command line, ``cases`` lists what to run, ``data`` makes the inputs,
``checks`` compares with a reference, ``run_operator`` and ``run_layer`` run a case on one rank,
``runner`` drives them, ``report`` prints, ``rows`` keeps the results.
"""
