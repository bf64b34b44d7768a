"""The killable pool: reward functions run in processes that can be ended at any moment.

    rank: RewardPool ──control──► supervisor ──fork──► pool workers: the functions
      ▲────────────────────channel, output────────────────┘

A rank owns one `pool`, which splits a batch into calls (`call_queue`) and sends them to its workers (`processes`,
`protocol`). The `supervisor` is a process without user code: it forks workers, kills them with all their descendants,
and ends everything when the rank is gone. A `pool_worker` loads the functions after it has dropped its privileges
(`limits`, `sandbox`). What a worker sends is untrusted and checked.
"""
