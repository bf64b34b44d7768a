"""Turn the garbage collector off on import: the first module that a waiting worker preloads.

The modules that the worker imports next create half a million objects that stay alive. The collector would scan them
over and over, which takes a tenth of the worker's start-up time. `RankActor` turns it on again.
"""

import gc

gc.disable()
