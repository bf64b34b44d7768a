"""Advantages, losses and KL estimators: tensors in, tensors out; no I/O and no process groups.

Each loss is one pure function over flat tokens. `aggregation` weights token losses by denominators of the whole
optimizer step, so losses, gradients and metrics don't depend on how rows are batched or on the number of ranks.
`registry` looks functions up by their name in the configuration, which may be a user's `package.module:function`.
"""
