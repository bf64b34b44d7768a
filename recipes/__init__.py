"""One file an algorithm: the driver's loop, which reads like the paper's pseudo-code."""
