"""The batch container.

`BatchedDataDict` is a batch as named columns (tensors, `Ragged`, lists); `fields` declares the columns with a fixed
meaning. Plans from `rlpack.packing` shard it over ranks and restore the results. `offload`, `remote`, `store` and
`dataset_cache` keep token-sized payloads in an object store, so that the driver moves only stubs.
`bucket` is the form in which weights travel.
"""
