"""Mutation testing of the kernels: would the tests notice if a line of csrc/kernels were wrong?

Every operator, constant, condition, call and statement of the kernels' text is changed in turn, one at a time
(operators.py), and the changed text is compiled and launched on the emulator for calls that are chosen from
the suite's random problems (trials.py). A mutant is killed by the compiler, by a report of the checks for
races, bounds and uninitialised reads, by a result outside the accuracy rule, by NaN from memory that no row
may see, by a count above that of the kernels as they are (bytes, loads, products, barriers), by a timeout, or
by a crash. One that survives is a hole in the trials, or computes the same: one in forty does.

    python -m tests.mutation                      all mutants; goes on where the last run ended
    python -m tests.mutation --sample 200 --seed 1
    python -m tests.mutation --file steps.h
"""
