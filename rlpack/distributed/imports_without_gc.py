"""Turns the garbage collector off as it is imported: the first module that a waiting worker preloads.

The modules that the worker imports next make half a million objects that stay. The collector would look at them again
and again, which takes a tenth of the worker's start. `RankActor` turns it on again.
"""

import gc

gc.disable()
