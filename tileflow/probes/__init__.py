"""What ``tileflow.doctor`` looks at: one file per part of a machine, each free of side effects.

A probe returns findings and may throw: :func:`tileflow.probes.finding.guard` turns that into one
more finding. What could crash or hang a process (the driver, foreign libraries) is asked in a
child process with a limit.
"""
