"""Bin packing and partitioning on integer sizes.

`packers` has the packing algorithms by name (`best_fit`, `first_fit` and `optimal` implement the longer ones),
`partition` divides weights into k parts, `contiguous` cuts sorted rows into padded runs, and `halving` splits the
costliest bins. `kernels` has the shared inner loops; `jit` compiles them with Numba, `jit_warmup` ahead of time.
"""
